"""RMSNorm in Triton, one program a row. The reference is in kernels/ops/rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import next_power_of_2, pdl


@triton.jit
def _rms_norm(
    x, weight, out, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * D + columns, (normed * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x, [T, D]. x is [T, D] with contiguous rows."""
    rows, size = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(size)
    _rms_norm[(rows,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        size,
        block,
        num_warps=max(1, min(16, block // 512)),
        **pdl(x),
    )
    return out
