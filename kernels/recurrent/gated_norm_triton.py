"""The gated RMSNorm of heads in Triton. The reference is in kernels/ops/rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl

_ELEMENTS = 1024
"""Numbers that a program norms, unless a head has more."""


@triton.jit
def _gated_rms_norm(
    x,
    weight,
    gate,
    out,
    gate_stride,
    eps,
    H,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, DIM)[None, :]
    w = tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (heads < H) & (dims < D)
    places = heads * D + dims
    value = tl.load(x + token * H * D + places, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + token * gate_stride + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    normed = ((value * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    result = normed * (g / (1.0 + tl.exp(-g)))
    tl.store(out + token * H * D + places, result.to(dtype), mask=inside)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return the norm of each head times silu(gate). x is contiguous; see the reference."""
    tokens, dim = len(x), len(weight)
    heads, width = x.shape[1] // dim, triton.next_power_of_2(dim)
    some = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // width))
    out = torch.empty_like(x)
    _gated_rms_norm[(tokens, triton.cdiv(heads, some))](
        x,
        weight,
        gate,
        out,
        gate.stride(0),
        eps,
        heads,
        dim,
        some,
        width,
        num_warps=4,
        **pdl(x),
    )
    return out
