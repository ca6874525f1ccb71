"""The gated delta net of one layer: the projections around its convolution and its recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.executor.layers.linear import Linear, RowParallelLinear
from sidestep.executor.layers.matrix_products import may_stack, stacked
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.native.recurrent import NativeDelta
from sidestep.kernels.ops.gated_delta import delta_net
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.state_rows import StateRows


class DeltaState(NamedTuple):
    """The states of one rank's part of one layer, a row a sequence."""

    conv: Tensor
    """[N, C, K - 1] Last inputs of the convolution, the newest last."""
    delta: Tensor
    """float32 [N, Hv, Dk, Dv]"""


class RecurrentStep(NamedTuple):
    """The states of all recurrent layers of a rank, and the rows of a step that use them."""

    states: Sequence[DeltaState]
    """The states of the first recurrent layer first."""
    rows: StateRows


def new_delta_state(
    spec: DeltaSpec, num_states: int, parallel: Parallel, dtype: torch.dtype, device: torch.device
) -> DeltaState:
    """Return memory for the states of one rank's part of one layer."""
    conv, delta = spec.conv_state(parallel.size), spec.delta_state(parallel.size)
    return DeltaState(
        torch.zeros(num_states, *conv, dtype=dtype, device=device),
        torch.zeros(num_states, *delta, dtype=torch.float32, device=device),
    )


class _Part(NamedTuple):
    """A rank's rows of a part of the projection to queries, keys and values."""

    total: int
    """All rows of the projection."""
    rows: range


def _parts(spec: DeltaSpec, parallel: Parallel) -> list[_Part]:
    """Return this rank's queries, keys and values."""
    keys = spec.num_key_heads * spec.key_dim
    values = spec.num_value_heads * spec.value_dim
    own, first, found = (keys, keys, values), 0, []
    for width in own:
        share = parallel.share(width)
        found.append(_Part(sum(own), range(first + share.start, first + share.stop)))
        first += width
    return found


class GatedDeltaNet:
    """The gated delta net of one layer, in the place of attention.

    after: the norm of its result, if there is one. following: the norm of the stream behind it.
    """

    def __init__(
        self,
        spec: DeltaSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        following: RmsNorm,
        parallel: Parallel,
        *,
        norm_eps: float,
        after: RmsNorm | None = None,
    ) -> None:
        self._following = following
        parts, heads = _parts(spec, parallel), parallel.share(spec.num_value_heads)
        width = spec.num_value_heads * spec.value_dim
        self._in, self._gates = self._projections(spec, hidden_size, weights, name, parallel)
        kernel = [
            weights.get(f"{name}.conv1d.weight", (part.total, 1, spec.conv_kernel), rows=part.rows)
            for part in parts
        ]
        a_log, bias = (
            weights.exact(f"{name}.{one}", (spec.num_value_heads,), heads)
            for one in ("A_log", "dt_bias")
        )
        self._weights = DeltaWeights(
            torch.cat(kernel).squeeze(1),
            a_log,
            bias,
            weights.get(f"{name}.norm.weight", (spec.value_dim,)),
            norm_eps,
        )
        self._native = NativeDelta.of(self._weights, spec.key_dim)
        self._out = RowParallelLinear(
            weights,
            f"{name}.out_proj",
            hidden_size,
            width,
            parallel.share(width),
            parallel,
            SumBuffer.ATTENTION,
            after=after,
        )
        self._channels, self._num_heads = len(self._weights.conv), len(heads)

    def _projections(
        self, spec: DeltaSpec, hidden_size: int, weights: Weights, name: str, parallel: Parallel
    ) -> tuple[Linear, Linear | None]:
        """Return the product that gives queries, keys, values, gate, and inputs of the decay.

        The last ones are a product of their own in checkpoints that keep them in another form.
        """
        heads = spec.num_value_heads
        qkv = [(f"{name}.in_proj_qkv", *part) for part in _parts(spec, parallel)]
        others = (("z", heads * spec.value_dim), ("b", heads), ("a", heads))
        rest = [(f"{name}.in_proj_{one}", total, parallel.share(total)) for one, total in others]
        found: dict[str, Matrix] = {
            f"{part} {rows}": weights.matrix(part, (total, hidden_size), rows=rows)
            for part, total, rows in [*qkv, *rest]
        }
        if may_stack(list(found.values())):
            return Linear(stacked(found)), None
        every = list(found.items())
        return Linear(stacked(dict(every[:-2]))), Linear(stacked(dict(every[-2:])))

    def _projected(self, stream: Stream) -> Projected:
        """Return the first projection's parts."""
        whole = self._in(stream)
        if self._gates is None:
            whole, ba = whole.split([whole.shape[1] - 2 * self._num_heads, 2 * self._num_heads], 1)
        else:
            ba = self._gates(stream)
        return Projected(whole[:, : self._channels], whole[:, self._channels :], ba)

    @property
    def first_product(self) -> ProductBehind | None:
        """The only product of the stream, if there is one and its matrix is coded."""
        codes = self._in.codes
        if codes is None or self._gates is not None:
            return None
        return ProductBehind(codes, crowded=False)

    def warm_up(self, stream: Stream) -> Stream:
        """Run the products alone."""
        gate = self._projected(stream).gate.contiguous()
        return self._out.add_to(stream.hidden, gate, self._following)

    def __call__(
        self, stream: Stream, state: DeltaState, rows: StateRows, wanted: Tensor | None = None
    ) -> Stream:
        """Return the stream with the result added, and update the states as `rows` says.

        wanted: tokens of which more is needed than their states, int [R]; None for all.
        """
        projected = self._projected(stream)
        mixed = delta_net(projected, self._weights, state.conv, state.delta, rows, self._native)
        if wanted is not None:
            stream, mixed = stream.of_rows(wanted), mixed.index_select(0, wanted)
        return self._out.add_to(stream.hidden, mixed, self._following)
