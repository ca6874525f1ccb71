"""Inputs of a product in 8 bits, with a scale for each row, or for each 128 columns of a row.

The norm before the product, if any, is done on the way, and so is the sum into the stream or the
activation that come before that: their results are rounded as by kernels of their own. Codes lie in
the order of kernels/quantized/device_matrix.py, as those of the matrix do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.rms_norm import QuantizedRows, RmsNorm, Stream
from sidestep.kernels.ops.silu_mul import GateAndUp
from sidestep.kernels.quantized.coded_matrix import ROUNDED, Rounded
from sidestep.kernels.quantized.device_matrix import STEP
from sidestep.kernels.triton.silu_mul_triton import gated_silu


@triton.jit(do_not_specialize=["eps"])
def _quantize_rows(
    x,
    added,
    norm,
    input_scale,
    codes,
    scales,
    eps,
    x_stride,
    K: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUPED: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    if norm is not None:
        weight = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    source = x + row * x_stride + columns
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if HALVES:
        up = tl.load(source + K, mask=inside, other=0.0)
        value = gated_silu(value, up, dtype).to(dtype).to(tl.float32)
    if added is not None:
        more = tl.load(added + row * K + columns, mask=inside, other=0.0)
        summed = (value + more.to(tl.float32)).to(dtype)
        tl.store(source, summed, mask=inside)
        value = summed.to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
        value = ((value * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    GROUPS: tl.constexpr = BLOCK // 128 if GROUPED else 1
    value = value.reshape(GROUPS, BLOCK // GROUPS)
    group = tl.arange(0, GROUPS)
    if input_scale is None:
        # NaN, which an integer does not have and a maximum drops, is left in the scale.
        largest = tl.max(tl.abs(value), 1)
        lost = tl.sum((value != value).to(tl.int32), 1) > 0
        scale = tl.where(lost, float("nan"), tl.maximum(largest, 1e-30) / LARGEST)
    else:
        scale = tl.load(input_scale + tl.zeros([GROUPS], tl.int32))
    rounded = tl.clamp(value / scale[:, None], -LARGEST, LARGEST)
    # Columns are 64 piece + 16 c + 8 half + 2 t + neighbour.
    rounded = rounded.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 1, 4, 2)
    first, second = rounded.split()
    rounded = tl.join(second, first).reshape(BLOCK)
    kind: tl.constexpr = codes.dtype.element_ty
    # Round to the nearest, to even if two are as near, by a sum whose last bit counts as much as
    # the last one of the code. The conversion is then exact, also in Triton's interpreter.
    if kind == tl.int8:
        large = 12582912.0
    else:
        power = (rounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(power, 0.015625) * 1572864.0
    rounded = (rounded + large) - large
    tl.store(codes + row * FILLED + columns, rounded.to(kind), mask=columns < FILLED)
    WIDTH: tl.constexpr = (K + 127) // 128 if GROUPED else 1
    tl.store(scales + row * WIDTH + group, scale, mask=group < WIDTH)


def quantize_rows(
    x: Tensor | Stream | GateAndUp,
    kind: Rounded,
    *,
    grouped: bool,
    input_scale: Tensor | None = None,
    added: Tensor | None = None,
) -> QuantizedRows:
    """Return the rows of x [T, K], or of a stream's norm, or of an activation, in 8 bits.

    grouped: whether each 128 columns have a scale. input_scale: float32 [1], the scale of all rows;
    None where each has its own, by its largest number. added: [T, K], contiguous, which is first
    added to x or to the stream, in place.
    """
    norm: RmsNorm | None = None
    halves = isinstance(x, GateAndUp)
    if isinstance(x, GateAndUp):
        x = x.both
    elif isinstance(x, Stream):
        # Norms of other kinds, and those that are done, are not computed here.
        norm = x.norm if x.done is None and x.norm.may_begin else None
        assert added is None or norm is not None
        x = x.normed() if norm is None else x.hidden
    tokens, columns = x.shape[0], x.shape[1] // (1 + halves)
    filled = -(-columns // STEP) * STEP
    codes = torch.empty(tokens, filled, dtype=ROUNDED[kind], device=x.device)
    groups = -(-columns // STEP) if grouped else 1
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(filled)
    _quantize_rows[(tokens,)](
        x,
        added,
        None if norm is None else norm.weight,
        input_scale,
        codes,
        scales,
        0.0 if norm is None else norm.eps,
        x.stride(0),
        columns,
        filled,
        block,
        448.0 if kind == "fp8" else 127.0,
        grouped,
        halves,
        num_warps=max(1, min(16, block // 512)),
        **pdl(x),
    )
    return QuantizedRows(codes, scales)
