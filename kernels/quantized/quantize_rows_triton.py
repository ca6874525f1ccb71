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

from sidestep.kernels.launch import has_pdl, next_power_of_2, pdl
from sidestep.kernels.ops.rms_norm import QuantizedRows, RmsNorm, Stream
from sidestep.kernels.ops.silu_mul import GateAndUp
from sidestep.kernels.quantized.coded_matrix import ROUNDED, Rounded
from sidestep.kernels.quantized.device_matrix import STEP
from sidestep.kernels.triton.silu_mul_triton import gated_silu
from sidestep.kernels.unfinished_product import UnscaledProduct, without_scales

_WORD = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)
"""Make a word of four numbers."""
_GATED = tl.constexpr(
    "{ .reg .b32 g, u, a, b, c, d; cvt.rn.bf16x2.f32 g, $2, $1; cvt.rn.bf16x2.f32 u, $4, $3;"
    " shl.b32 a, g, 16; and.b32 b, g, 0xFFFF0000;"
    " mul.f32 c, a, 0fBFB8AA3B; mul.f32 d, b, 0fBFB8AA3B;"
    " ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d;"
    " add.f32 c, c, 0f3F800000; add.f32 d, d, 0f3F800000;"
    " rcp.approx.ftz.f32 c, c; rcp.approx.ftz.f32 d, d; mul.f32 a, a, c; mul.f32 b, b, d;"
    " cvt.rn.bf16x2.f32 g, b, a; mul.rn.bf16x2 $0, g, u; }"
)
"""Make silu(gate) * up of two gates and ups in float32, with gated_silu's roundings to bfloat16.

Instructions bound the kernel, and these are fewer: numbers are converted two at a time, and those
below float32's normal ones count as 0."""


@triton.jit
def _given(source, factor, columns, width, inside, HALVES: tl.constexpr, NATIVE: tl.constexpr):
    """Return numbers of a row, or of the activation, in x's type.

    factor, columns: the scales of a row and of the columns before the activation, or None.
    """
    value = tl.load(source, mask=inside, other=0.0)
    if HALVES:
        dtype: tl.constexpr = source.dtype.element_ty
        up = tl.load(source + width, mask=inside, other=0.0)
        if columns is not None:
            value = value.to(tl.float32) * (tl.load(columns, mask=inside, other=0.0) * factor)
            more = tl.load(columns + width, mask=inside, other=0.0) * factor
            up = up.to(tl.float32) * more
        if NATIVE and dtype == tl.bfloat16:
            value = tl.inline_asm_elementwise(
                _GATED,
                "=r,r,r,r,r",
                [value.to(tl.float32), up.to(tl.float32)],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            value = gated_silu(value, up, dtype).to(dtype)
    return value


@triton.jit
def _summed(source, more, part, factor, columns, inside, PARTS: tl.constexpr):
    """Return numbers of a row and the parts of another one, and write their sum over the first.

    factor, columns: the scales of the other row and of its columns, or None.
    """
    value = tl.load(source, mask=inside, other=0.0)
    summed = tl.load(more, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        summed += tl.load(more + i * part, mask=inside, other=0.0).to(tl.float32)
    if columns is not None:
        summed *= tl.load(columns, mask=inside, other=0.0) * factor
    value = (value.to(tl.float32) + summed).to(source.dtype.element_ty)
    tl.store(source, value, mask=inside)
    return value


@triton.jit
def _normed(value, factor, weight):
    """Return the norm of numbers, in their type."""
    dtype: tl.constexpr = value.dtype
    normed = (value.to(tl.float32) * factor).to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def _size(value):
    """Return the bits of absolute values in float32. They have the numbers' order, NaN above all.

    NaN is lost in a maximum of numbers.
    """
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scaled(value, inverse):
    """Return numbers [G, 8] times the inverses of their groups' scales, in float32."""
    groups: tl.constexpr = inverse.shape[0]
    value = value.to(tl.float32).reshape(groups, value.numel // groups) * inverse[:, None]
    return value.reshape(value.numel // 8, 8)


@triton.jit
def _rounded(value, LARGEST: tl.constexpr, INTEGERS: tl.constexpr):
    """Return the code of each number in the lowest eight bits.

    A sum whose last bit counts as much as the last one of the code rounds to the nearest, to even
    if two are as near. The conversion is then exact, also in Triton's interpreter.
    """
    value = tl.clamp(value, -LARGEST, LARGEST)
    if INTEGERS:
        return ((value + 12582912.0) - 12582912.0).to(tl.int32) & 0xFF
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(power, 0.015625) * 1572864.0
    value = ((value + large) - large).to(tl.float8e4nv)
    return value.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _words(first, second, LARGEST: tl.constexpr, INTEGERS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the words of scaled numbers [G, 8], which are the two halves of each 16 columns."""
    f0, f1 = first.reshape(first.shape[0], 4, 2).split()
    s0, s1 = second.reshape(first.shape[0], 4, 2).split()
    if NATIVE and not INTEGERS:
        return tl.inline_asm_elementwise(
            _WORD, "=r,r,r,r,r", [s0, f0, s1, f1], dtype=tl.int32, is_pure=True, pack=1
        )
    f0, f1 = _rounded(f0, LARGEST, INTEGERS), _rounded(f1, LARGEST, INTEGERS)
    s0, s1 = _rounded(s0, LARGEST, INTEGERS), _rounded(s1, LARGEST, INTEGERS)
    return s0 | (f0 << 8) | (s1 << 16) | (f1 << 24)


@triton.jit(do_not_specialize=["eps"])
def _quantize_rows(
    x,
    added,
    norm,
    input_scale,
    x_rows,
    x_columns,
    words,
    scales,
    eps,
    x_stride,
    K: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGERS: tl.constexpr,
    GROUPED: tl.constexpr,
    HALVES: tl.constexpr,
    PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # A thread has both halves of 16 columns, of which it makes four words.
    columns = tl.arange(0, BLOCK // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    inside, inside_second = columns < K, columns + 8 < K
    if norm is not None:
        weight = tl.load(norm + columns, mask=inside, other=0.0)
        second_weight = tl.load(norm + 8 + columns, mask=inside_second, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = x + row * x_stride
    if added is not None:
        # Whole lines are written at once, and threads swap numbers then.
        natural = tl.arange(0, BLOCK)
        part = tl.num_programs(0).to(tl.int64) * K
        factor, scale_of = 1.0, x_columns
        if x_columns is not None:
            factor, scale_of = tl.load(x_rows + row), x_columns + natural
        more = added + row * K + natural
        value = _summed(source + natural, more, part, factor, scale_of, natural < K, PARTS)
        first, second = value.reshape(BLOCK // 16, 2, 8).permute(0, 2, 1).split()
    else:
        factor, low, high = 1.0, x_columns, x_columns
        if x_columns is not None:
            factor, low, high = tl.load(x_rows + row), low + columns, high + columns + 8
        first = _given(source + columns, factor, low, K, inside, HALVES, NATIVE)
        second = _given(source + columns + 8, factor, high, K, inside_second, HALVES, NATIVE)
    if norm is not None:
        low, high = first.to(tl.float32), second.to(tl.float32)
        factor = tl.rsqrt(tl.sum(low * low + high * high) / K + eps)
        first = _normed(first, factor, weight)
        second = _normed(second, factor, second_weight)
    GROUPS: tl.constexpr = BLOCK // 128 if GROUPED else 1
    group = tl.arange(0, GROUPS)
    if input_scale is None:
        size = tl.maximum(_size(first), _size(second)).reshape(GROUPS, BLOCK // 2 // GROUPS)
        largest = tl.max(size, 1).to(tl.float32, bitcast=True)
        scale = tl.where(largest < 1e-30, 1e-30, largest) / LARGEST
    else:
        scale = tl.load(input_scale + tl.zeros([GROUPS], tl.int32))
    inverse = 1.0 / scale
    made = _words(_scaled(first, inverse), _scaled(second, inverse), LARGEST, INTEGERS, NATIVE)
    # Word 4 t + c of a piece of 64 columns has columns 16 c + 2 t and their neighbours.
    made = made.reshape(BLOCK // 64, 4, 4).permute(0, 2, 1).reshape(BLOCK // 4)
    place = tl.arange(0, BLOCK // 4)
    tl.store(words + row * (FILLED // 4) + place, made, mask=place < FILLED // 4)
    WIDTH: tl.constexpr = (K + 127) // 128 if GROUPED else 1
    tl.store(scales + row * WIDTH + group, scale, mask=group < WIDTH)


def quantize_rows(
    x: Tensor | Stream | GateAndUp,
    kind: Rounded,
    *,
    grouped: bool,
    input_scale: Tensor | None = None,
    added: Tensor | UnscaledProduct | None = None,
) -> QuantizedRows:
    """Return the rows of x [T, K], or of a stream's norm, or of an activation, in 8 bits.

    grouped: whether each 128 columns have a scale. input_scale: float32 [1], the scale of all rows;
    None where each has its own, by its largest number. added: [T, K], scaled or not, or parts of it
    [P, T, K], contiguous, which are first added to x or to the stream, in place.
    """
    norm: RmsNorm | None = None
    halves = isinstance(x, GateAndUp)
    x_rows, x_columns = None, None
    if isinstance(added, UnscaledProduct):
        added, x_rows, x_columns = added
    if isinstance(x, GateAndUp):
        if isinstance(x.both, UnscaledProduct):
            x_rows, x_columns = x.both.rows, x.both.columns
        x = without_scales(x.both)
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
    block = next_power_of_2(filled)
    _quantize_rows[(tokens,)](
        x,
        added,
        None if norm is None else norm.weight,
        input_scale,
        x_rows,
        x_columns,
        codes.view(torch.int32),
        scales,
        0.0 if norm is None else norm.eps,
        x.stride(0),
        columns,
        filled,
        block,
        448.0 if kind == "fp8" else 127.0,
        kind == "int8",
        grouped,
        halves,
        1 if added is None else added.numel() // x.numel(),
        has_pdl(x.device),
        num_warps=_warps(block, 32 if halves and x_columns is None and not grouped else 16),
        **pdl(x),
    )
    return QuantizedRows(codes, scales)


def _warps(block: int, most: int) -> int:
    """Return the warps of a program.

    A wide activation without scales leaves them registers enough to be 32.
    """
    return max(1, min(most, block // 512))
