"""Experts on a CPU by kernels in C, for matrices in float32 and in codes of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sidestep.executor.layers.experts.shared_expert import ExpertWeights
from sidestep.executor.layers.layouts.native_layouts import takes
from sidestep.executor.layers.layouts.native_matrices import (
    Kernel,
    PackedMatrix,
    is_kept,
    kernel_of,
    packed_codes,
    packed_plain,
)
from sidestep.executor.layers.layouts.plain_layouts import packed as packed_by_onednn
from sidestep.executor.layers.layouts.rounding_layouts import is_large, rounded
from sidestep.ipc.model.layer_spec import Activation, ClampedSwiglu
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.native import rows
from sidestep.kernels.native.experts import CODED, SOURCE, ExpertStack, sort_pairs, sum_pairs
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

_MOST_PAIRS = 8192
"""Pairs of a token and an expert that are multiplied together, so that results take little memory.
"""


class NativeExperts:
    """Experts on a CPU by kernels in C. See experts.c for what a token's bits depend on."""

    def __init__(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        experts: int,
        activation: Activation | ClampedSwiglu,
    ) -> None:
        self._gate_up, self._down, self._experts = gate_up, down, experts
        self._activation = activation

    def __repr__(self) -> str:
        return f"NativeExperts({self._gate_up!r}, {self._down!r})"

    @classmethod
    def of(cls, weights: ExpertWeights, dtype: torch.dtype) -> NativeExperts | None:
        """Load the experts one by one. Return None where only others multiply, or do so faster.

        dtype: the run's type.
        """
        gate_up = _stacked(weights.gate_up, weights.experts, dtype)
        down = None if gate_up is None else _stacked(weights.down, weights.experts, dtype)
        if gate_up is None or down is None:
            return None
        return cls(gate_up, down, len(weights.experts), weights.spec.activation)

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
        most = max(1, _MOST_PAIRS // routed.chosen)
        for first in range(0, len(x), most):
            part = slice(first, first + most)
            pairs = sort_pairs(routed.ids[part], self._experts)
            inner = self._gate_up.products(x[part], pairs, of="tokens")
            gated = _activated(inner, self._activation, pairs.used)
            results = self._down.products(gated, pairs, of="pairs")
            sum_pairs(results, pairs, routed.weights[part], out[part], add=add)


def _activated(both: Tensor, activation: Activation | ClampedSwiglu, used: int) -> Tensor:
    """Return the gated activation [P, F] of rows [P, 2 F]. used: address of their number."""
    if isinstance(activation, ClampedSwiglu):
        made = rows.clamped_swiglu(both, activation.alpha, activation.limit, used)
    elif activation == "gelu_tanh":
        made = rows.gelu_mul(both, used)
    else:
        made = rows.silu_mul(both, used)
    assert made is not None, "the same compiler builds all kernels"
    return made


def _stacked(
    matrix: Callable[[int], ExpertMatrix | CodedMatrix], experts: Sequence[int], dtype: torch.dtype
) -> ExpertStack | None:
    """Return the matrices of these experts as kernels in C take them; None if one is refused."""
    kernels: set[Kernel] = set()
    packed: list[PackedMatrix] = []
    for expert in experts:
        found = _packed(matrix(expert), dtype)
        if found is None or len(kernels | {found[0]}) > 1:  # all are in codes, or none
            return None
        kernels.add(found[0])
        packed.append(found[1])
    (kernel,) = kernels
    kept = [part for one in packed for part in one.kept]
    return ExpertStack(kernel.address, [one.described for one in packed], kept)


def _packed(
    given: ExpertMatrix | CodedMatrix, dtype: torch.dtype
) -> tuple[Kernel, PackedMatrix] | None:
    """Return an expert's matrix for a kernel in C; None for what others multiply faster."""
    matrix: Tensor | CodedMatrix = given if isinstance(given, CodedMatrix) else given.coded(dtype)
    bias = None if isinstance(given, CodedMatrix) else given.bias
    if isinstance(matrix, CodedMatrix):
        kernel = kernel_of(SOURCE, "products", dtype, CODED)
        if kernel is not None and takes(matrix):
            whole = matrix if is_kept(matrix) else rounded(matrix)
            return kernel, packed_codes(whole, kernel.tile, bias)
        if isinstance(given, CodedMatrix) and is_large(given):
            return None  # other layouts take less memory than decoded numbers
        matrix = matrix.decoded()
    kernel = kernel_of(SOURCE, "products", dtype)
    # oneDNN multiplies many rows of 16 bits faster, where the CPU has instructions for them.
    if kernel is None or (dtype != torch.float32 and packed_by_onednn(matrix[:1]) is not None):
        return None
    return kernel, packed_plain(matrix, kernel.tile, bias)
