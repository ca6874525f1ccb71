"""A gate's sigmoid times a result of attention in Triton, in the result's place.

The reference is in kernels/ops/silu_mul.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import opens_early

_BLOCK = 512
"""Numbers of a program."""
_FEW_ROWS = 64
"""Rows up to which the next product loads its weights while the kernel before still runs."""


@opens_early
@triton.jit
def _sigmoid_mul(
    x,
    gate,
    x_stride,
    gate_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    dtype: tl.constexpr = x.dtype.element_ty
    own = x + token * x_stride + columns
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    logit = tl.load(gate + token * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    tl.store(own, (value * factor).to(dtype), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiply x [T, N] with the sigmoid of gate [T, N], whose rows are contiguous, in place."""
    rows, width = x.shape
    _sigmoid_mul[(rows, cdiv(width, _BLOCK))](
        x,
        gate,
        x.stride(0),
        gate.stride(0),
        width,
        _BLOCK,
        rows <= _FEW_ROWS,
        num_warps=4,
        **pdl(x),
    )
