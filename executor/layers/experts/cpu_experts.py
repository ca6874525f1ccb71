"""Experts on a CPU, one product for each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.layers.experts.shared_expert import ExpertWeights
from sidestep.executor.layers.linear import Linear
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.coded_matrix import CodedMatrix


def _linear(matrix: ExpertMatrix | CodedMatrix, dtype: torch.dtype) -> Linear:
    if isinstance(matrix, CodedMatrix):
        return Linear(matrix)
    return Linear(matrix.decoded(dtype).values, matrix.bias)


class CpuExperts:
    """Experts on a CPU: each multiplies all its tokens at once.

    A row of a product does not depend on the rows beside it (see CpuProduct), and a token's results
    are added in the order of its choice. So the bits of a token depend on that token alone.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        """Load the experts one by one."""
        self._activation = weights.spec.activation
        self._gate_up = [_linear(weights.gate_up(expert), dtype) for expert in weights.experts]
        self._down = [_linear(weights.down(expert), dtype) for expert in weights.experts]

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. None of it is computed here.
        """
        assert isinstance(routed, Routed)
        chosen = routed.chosen
        ids = routed.ids.flatten()
        # The pairs of a token and a choice, in the order of their experts: other ranks' first.
        pairs = ids.argsort(stable=True)
        counts = torch.bincount(ids + 1, minlength=1 + len(self._down)).tolist()
        others, *parts = pairs.split(counts)
        results = x.new_empty(len(ids), x.shape[1])
        results[others] = 0
        for gate_up, down, own in zip(self._gate_up, self._down, parts, strict=True):
            if len(own):
                gated = gate_up.gated(x.index_select(0, own // chosen), self._activation)
                results[own] = down(gated)
        weighted = results.unflatten(0, routed.ids.shape).float() * routed.weights[..., None]
        total = weighted[:, 0]
        for rank in range(1, chosen):
            total += weighted[:, rank]
        if add:
            out += total
        else:
            out.copy_(total)
