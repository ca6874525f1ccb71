"""Experts on a GPU: their matrices as its kernels take them, and their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from sidestep.executor.layers.experts.shared_expert import ExpertWeights
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.layer_spec import ClampedSwiglu
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

T = TypeVar("T")

_TOGETHER = 32 << 20
"""Bytes of matrices in codes that are repacked together."""


def on_device(matrix: ExpertMatrix | CodedMatrix) -> ExpertMatrix | ExpertCodes:
    """Return an expert's matrix as a GPU's kernels take it.

    Raises EngineStartError for groups that no kernel reads.
    """
    if isinstance(matrix, ExpertMatrix):
        return matrix if matrix.scales is None else ExpertCodes.of_mxfp4(matrix)
    return _coded(ExpertCodes.of, matrix)


def _coded(repacked: Callable[[T], ExpertCodes], given: T) -> ExpertCodes:
    """Return repacked codes. Raises EngineStartError where `repacked` raises ValueError."""
    try:
        return repacked(given)
    except ValueError as error:
        raise EngineStartError(f"model: {error}") from None


class GpuExperts:
    """Experts on a GPU, whose matrices are stacked."""

    def __init__(self, weights: ExpertWeights) -> None:
        """Load the experts one by one into the stacks."""
        spec, activation = weights.spec, weights.spec.activation
        self._num_experts, self._some = spec.num_experts, spec.whole
        self._gelu = activation == "gelu_tanh"
        self._clamped = (
            (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiglu) else None
        )
        self._gate_up = _stacked(weights.gate_up, weights.experts)
        self._down = _stacked(weights.down, weights.experts)
        self.behind: ProductBehind | None = None
        """The product of the norm of the result, if it is known."""

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> Begun | None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. Return the part of it that is computed, or the
        product behind it, or None.
        """
        from sidestep.kernels.experts.experts_triton import few_pairs, multiply_experts

        return multiply_experts(
            x,
            routed,
            self._gate_up,
            self._down,
            out,
            add=add,
            gelu=self._gelu,
            clamped=self._clamped,
            # A rank with whole experts has the same share of the pairs, on average.
            few=few_pairs(len(x), routed.chosen, self._num_experts),
            some=self._some,
            norm=norm,
            behind=self.behind,
        )

    def read_first(self, x: Tensor, chosen: int) -> Tensor | None:
        """Return what is read first for x [T, D], to be asked for before, or None (see Ahead).

        chosen: experts of a token.
        """
        from sidestep.kernels.experts.experts_triton import read_first

        return read_first(x, chosen, self._gate_up, self._down, self._num_experts)


def _stacked(
    matrix: Callable[[int], ExpertMatrix | CodedMatrix], experts: Sequence[int]
) -> ExpertMatrix | ExpertCodes:
    """Return the matrices of these experts as one. Small ones in codes are repacked together."""
    first = on_device(matrix(experts[0]))
    stack = first.room_for(len(experts))
    if stack.is_meta:
        return stack  # all are alike without memory, and thousands take more than a minute
    stack.put(0, first)
    together = max(1, _TOGETHER // first.nbytes)
    for begin in range(1, len(experts), together):
        end = min(begin + together, len(experts))
        given = [matrix(expert) for expert in experts[begin:end]]
        coded = [one for one in given if isinstance(one, CodedMatrix)]
        if len(coded) == len(given):
            stack.put(slice(begin, end), _coded(ExpertCodes.of_all, coded))
        else:
            for place, one in enumerate(given, begin):
                stack.put(place, on_device(one))
    return stack
