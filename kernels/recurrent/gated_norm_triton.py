"""The gated RMSNorm of heads in Triton, of rows of many tokens.

The reference is in kernels/ops/rms_norm.py; rows of few tokens are in few_rows_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows

_ELEMENTS = 1024
"""Numbers that a program norms, unless a head has more."""


@triton.jit
def _gated_rms_norm(
    x,
    weight,
    gate,
    query_starts,
    out,
    gate_stride,
    eps,
    rows,
    H,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, DIM)[None, :]
    w = tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, ROWS)
    starts = tl.load(query_starts + every, mask=every < rows, other=0)
    ends = tl.load(query_starts + every + 1, mask=every < rows, other=0)
    if tl.sum(tl.where((starts <= token) & (token < ends), ends - starts, 0), 0) <= FEW:
        return
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


def gated_rms_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Write the norm of each head times silu(gate) of rows with more than FEW_TOKENS.

    x and out are contiguous; see the reference.
    """
    tokens, dim, num_rows = len(x), len(weight), len(rows.state_in)
    heads, width = x.shape[1] // dim, next_power_of_2(dim)
    some = min(next_power_of_2(heads), max(1, _ELEMENTS // width))
    _gated_rms_norm[(tokens, cdiv(heads, some))](
        x,
        weight,
        gate,
        rows.query_starts,
        out,
        gate.stride(0),
        eps,
        num_rows,
        heads,
        dim,
        some,
        width,
        FEW_TOKENS,
        next_power_of_2(num_rows),
        num_warps=4,
        **pdl(x),
    )
