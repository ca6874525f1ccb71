"""RMSNorm in Triton, one program a row. The reference is in kernels/ops/rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.ahead import Ahead
from sidestep.kernels.l2_triton import prefetch_block
from sidestep.kernels.launch import next_power_of_2, pdl

_PIECE_ROWS = 4
"""Rows of a matrix that a program asks for at once."""
_PIECE = 2048
"""Bytes of what the next kernel reads that a program asks for at once."""
_NOTHING = 0, 0, 0, 0, 1, 0


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    x_stride,
    eps,
    first,
    then,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BYTES: tl.constexpr,
    THEN: tl.constexpr,
    THEN_BYTES: tl.constexpr,
    EACH: tl.constexpr,
    STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """FIRST, THEN: pieces of what to ask L2 for, THEN in groups of EACH, STRIDE bytes apart."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if THEN > 0:
        for piece in range(tl.program_id(0), FIRST, tl.num_programs(0)):
            prefetch_block(first.to(tl.int64) + piece * FIRST_BYTES, FIRST_BYTES)
        for piece in range(tl.program_id(0), THEN, tl.num_programs(0)):
            place = (piece // EACH).to(tl.int64) * STRIDE + piece % EACH * THEN_BYTES
            prefetch_block(then.to(tl.int64) + place, THEN_BYTES)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * D + columns, (normed * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, ahead: Ahead | None = None) -> Tensor:
    """Return the RMSNorm of x, [T, D]. x is [T, D] with contiguous rows.

    ahead: what to ask L2 for. Its matrices begin at multiples of 16 bytes, and so do their rows.
    """
    rows, size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(size)
    _rms_norm[(rows,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        *(ahead or (None, None)),
        size,
        block,
        *(_NOTHING if ahead is None else _pieces(ahead)),
        num_warps=max(1, min(16, block // 512)),
        **pdl(x),
    )
    return out


def _pieces(ahead: Ahead) -> tuple[int, int, int, int, int, int]:
    """Return the pieces to ask for and their bytes, as the kernel takes them."""
    first, then = ahead
    groups, rows, _ = then.shape
    each, row = rows // _PIECE_ROWS, then.stride(1) * then.element_size()
    stride = then.stride(0) * then.element_size()
    return first.nbytes // _PIECE, _PIECE, groups * each, _PIECE_ROWS * row, each, stride
