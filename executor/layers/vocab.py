"""Embedding and output head, with the vocabulary spread over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.rounding_layouts import may_round
from sidestep.executor.layers.linear import Linear
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.quantization.encode import encode
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native.packing import exact_type
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, stack

_ROUNDED_AT_ONCE = 1 << 14
"""Rows of a head that a GPU rounds at once, so that this takes little memory."""


class _Shard(NamedTuple):
    """A rank's part of the vocabulary."""

    rows: range
    padding: int
    """Rows of zeros behind these, where the vocabulary does not divide evenly."""


def _shard(vocab_size: int, parallel: Parallel) -> _Shard:
    part = -(-vocab_size // parallel.size)
    first = min(parallel.rank * part, vocab_size)
    rows = range(first, min(first + part, vocab_size))
    return _Shard(rows, part - len(rows))


def vocab_shard(
    weights: Weights, name: str, vocab_size: int, hidden_size: int, parallel: Parallel
) -> Tensor:
    """Return this rank's rows of an embedding [V, D], which is not quantized."""
    rows, padding = _shard(vocab_size, parallel)
    own = weights.get(f"{name}.weight", (vocab_size, hidden_size), rows=rows)
    return torch.nn.functional.pad(own, (0, 0, 0, padding)) if padding else own


def head_shard(
    weights: Weights, name: str, vocab_size: int, hidden_size: int, parallel: Parallel
) -> Matrix:
    """Return this rank's rows of the output head [V, D], which may be quantized."""
    rows, padding = _shard(vocab_size, parallel)
    own = weights.matrix(name, (vocab_size, hidden_size), rows=rows)
    if isinstance(own, CodedMatrix):
        return own.padded(padding)
    return torch.nn.functional.pad(own, (0, 0, 0, padding)) if padding else own


def rounded_head(shard: Matrix, scheme: WeightScheme) -> Matrix:
    """Return a plain head in codes of 8 bits.

    A step reads the whole head, which has a large part of a small model's weights. A head that
    equals the embedding is kept beside it. A CPU's kernels are fastest with int8, whatever the
    scheme, and a head for which that gains nothing stays as it is there. Raises EngineStartError
    for a head that the files have in codes.
    """
    if not isinstance(shard, Tensor):
        raise EngineStartError(
            f"head_quantization: the files have the output head in {shard.described}; leave it out"
        )
    if on_gpu(shard):
        return stack([encode(part, scheme) for part in shard.split(_ROUNDED_AT_ONCE)])
    if shard.is_meta:
        return shard
    coded = encode(shard, WeightScheme(kind="int8"))
    return coded if may_round(coded) else shard


class VocabParallelEmbedding:
    """Token ids [T] to the residual stream [T, D]."""

    def __init__(
        self, shard: Tensor, parallel: Parallel, scale: float = 1.0, *, through_peers: bool = True
    ) -> None:
        """Look up the shard's rows.

        through_peers: whether the sum over ranks may go through their own memory. It may where the
        sums behind it do: two in a row must not use the same buffer.
        """
        # A step reads few rows of a table, which may be a large part of a CPU's memory.
        self._shard = shard if on_gpu(shard) else shard.to(exact_type(shard))
        self._dtype, self._through_peers = shard.dtype, through_peers
        # Rounded to the embedding's type, as in training.
        self._scale = torch.tensor(scale, dtype=shard.dtype).item()
        self._parallel = parallel
        self._first = parallel.rank * shard.shape[0]

    def __call__(self, token_ids: Tensor, norm: RmsNorm) -> Stream:
        """Return the stream. norm: the norm that the stream goes through first."""
        own, rows = self._own(token_ids), len(token_ids)
        if self._parallel.size == 1:
            return Stream(own, norm)
        through_peers = self._through_peers and norm.may_begin
        part = self._parallel.part(SumBuffer.EMBEDDING, rows) if through_peers else None
        if part is not None:
            part.mine.copy_(own)
            return part.sum(norm)
        return Stream(self._parallel.all_reduce(own), norm)

    def vectors(self, token_ids: Tensor) -> Tensor:
        """Return the vectors [T, D]."""
        own = self._own(token_ids)
        return own if self._parallel.size == 1 else self._parallel.all_reduce(own)

    def _own(self, token_ids: Tensor) -> Tensor:
        """Return the vectors of this rank's tokens, and zeros for other tokens: [T, D]."""
        if self._parallel.size == 1:
            return self._scaled(self._look_up(token_ids))
        local = token_ids - self._first
        outside = (local < 0) | (local >= self._shard.shape[0])
        vectors = self._look_up(local.masked_fill(outside, 0))
        return self._scaled(vectors).masked_fill_(outside[:, None], 0)

    def _look_up(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.embedding(rows, self._shard).to(self._dtype)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)


class VocabParallelHead:
    """A stream [R, D], normed, to logits [R, V], whole on every rank.

    So all ranks sample the same token.
    """

    def __init__(
        self,
        shard: Matrix,
        vocab_size: int,
        parallel: Parallel,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Multiply with the shard's rows. scale, softcap: see ModelSpec."""
        self._scale = scale
        self._softcap = softcap
        self._linear = Linear(shard)
        self._vocab_size = vocab_size
        self._parallel = parallel

    def new_logits(self, rows: int, like: Tensor) -> Tensor:
        """Return memory for the logits of this many rows, which `out` may be.

        It has the type of `like`, and is on the same device.
        """
        return like.new_zeros(rows, self._linear.num_rows * self._parallel.size)

    def __call__(self, stream: Stream, out: Tensor | None = None) -> Tensor:
        """Return the logits.

        out [R, V and padding]: memory that the logits are written to.
        """
        own = self._linear(stream, out if self._parallel.size == 1 else None)
        if self._scale != 1.0:
            own.mul_(self._scale)
        if self._softcap is not None:
            own.div_(self._softcap).tanh_().mul_(self._softcap)
        return self._parallel.all_gather(own, out)[:, : self._vocab_size]
