"""The gated delta net of one layer: the projections around its convolution and its recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.executor.layers.linear import Linear, RowParallelLinear, column_parallel
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.kernels.ops.causal_conv import causal_conv
from sidestep.kernels.ops.gated_delta import Decay, gated_delta
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream, gated_rms_norm
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
        self._in = self._projections(spec, hidden_size, weights, name, parallel)
        kernel = [
            weights.get(f"{name}.conv1d.weight", (part.total, 1, spec.conv_kernel), rows=part.rows)
            for part in parts
        ]
        self._conv = torch.cat(kernel).squeeze(1)
        self._decay = Decay(
            *(
                weights.exact(f"{name}.{one}", (spec.num_value_heads,), heads)
                for one in ("A_log", "dt_bias")
            )
        )
        self._norm = RmsNorm(weights.get(f"{name}.norm.weight", (spec.value_dim,)), norm_eps)
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
        self._channels, self._num_heads = len(self._conv), len(heads)

    def _projections(
        self, spec: DeltaSpec, hidden_size: int, weights: Weights, name: str, parallel: Parallel
    ) -> Linear:
        """Return the product that gives queries, keys, values, gate, and inputs of the decay."""
        heads = spec.num_value_heads
        qkv = [(f"{name}.in_proj_qkv", *part) for part in _parts(spec, parallel)]
        others = (("z", heads * spec.value_dim), ("b", heads), ("a", heads))
        rest = [(f"{name}.in_proj_{one}", total, parallel.share(total)) for one, total in others]
        return column_parallel(weights, [*qkv, *rest], hidden_size)

    def _gate(self, projected: Tensor) -> Tensor:
        return projected[:, self._channels : -2 * self._num_heads]

    def warm_up(self, stream: Stream) -> Stream:
        """Run the products alone."""
        gate = self._gate(self._in(stream)).contiguous()
        return self._out.add_to(stream.hidden, gate, self._following)

    def __call__(
        self, stream: Stream, state: DeltaState, rows: StateRows, wanted: Tensor | None = None
    ) -> Stream:
        """Return the stream with the result added, and update the states as `rows` says.

        wanted: tokens of which more is needed than their states, int [R]; None for all.
        """
        projected = self._in(stream)
        qkv = causal_conv(projected[:, : self._channels], self._conv, state.conv, rows)
        gates = projected[:, -2 * self._num_heads :]
        mixed = gated_delta(qkv, gates, self._decay, state.delta, rows)
        gate = self._gate(projected)
        if wanted is not None:
            stream = stream.of_rows(wanted)
            mixed, gate = mixed.index_select(0, wanted), gate.index_select(0, wanted)
        normed = gated_rms_norm(mixed, self._norm.weight, gate, self._norm.eps)
        return self._out.add_to(stream.hidden, normed, self._following)
