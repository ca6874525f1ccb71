"""Numbers of coded experts in Triton, from codes as they are stored: row by row.

The forms are those of kernels/experts/expert_matrix.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of


@triton.jit
def _numbers(codes, scale):
    """Return numbers of e2m1, the lower four bits of each code, times a scale."""
    # Twice their magnitudes, 0 1 2 3 4 6 8 12, lie in the constant, four bits each.
    twice = ((0xC8643210 >> ((codes & 7) * 4).to(tl.uint32)) & 15).to(tl.float32)
    return tl.where((codes & 8) != 0, -twice, twice) * (0.5 * scale)


@triton.jit
def _e4m3(codes):
    """Return numbers of e4m3."""
    # Numbers below the least exponent stay so, and the product with a power of two is exact.
    bits = ((codes & 128) << 24) | ((codes & 127) << 20)
    number = bits.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((codes & 127) == 127, float("nan"), number)


@triton.jit
def _inside(columns, there):
    """Return which numbers of these columns [1, K] and rows [N, 1], None for all, are read."""
    return columns if there is None else columns & there


@triton.jit
def _scaled(
    values,
    scales,
    rows,
    there,
    at,
    K: tl.constexpr,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return numbers of bytes, or of codes of 4 bits, times the scale of their group."""
    GROUPS: tl.constexpr = (K + WIDTH - 1) // WIDTH
    HERE: tl.constexpr = STEP // WIDTH if WIDTH < STEP else 1
    group = (at // WIDTH + tl.arange(0, HERE))[None, :]
    inside = _inside(group < GROUPS, there)
    scale = tl.load(scales + rows // HEIGHT * GROUPS + group, mask=inside, other=0.0)
    if KIND == "int4":
        pairs = (at // 2 + tl.arange(0, STEP // 2))[None, :]
        inside = _inside(pairs < K // 2, there)
        both = tl.load(values + rows * (K // 2) + pairs, mask=inside, other=0).to(tl.int32)
        codes = tl.interleave(both & 15, both >> 4).reshape(both.shape[0], HERE, STEP // HERE)
        number = (codes - zero_of(scale)[:, :, None]).to(tl.float32)
        scale = without_zero(scale)
    else:
        steps = (at + tl.arange(0, STEP))[None, :]
        inside = _inside(steps < K, there)
        if values.dtype.element_ty == tl.float8e4nv:
            number = tl.load(values + rows * K + steps, mask=inside, other=0.0).to(tl.float32)
        else:
            codes = tl.load(values + rows * K + steps, mask=inside, other=0).to(tl.int32)
            number = _e4m3(codes) if KIND == "fp8" else codes.to(tl.float32)
        if HERE > 1:
            number = number.reshape(number.shape[0], HERE, STEP // HERE)
    if HERE > 1 or KIND == "int4":
        number = (number * scale[:, :, None]).reshape(number.shape[0], STEP)
    else:
        number *= scale
    return number


@triton.jit
def expert_weights(
    values, scales, rows, there, at, K: tl.constexpr, STEP: tl.constexpr, FORM: tl.constexpr
):
    """Return STEP numbers from `at` on of these rows [N, 1] of a matrix with K columns, 0 outside.

    there: which rows are read [N, 1], with 0 for all others; None for all. scales: None for a
    matrix in the inputs' type. FORM: the form of others, or None for MXFP4.
    """
    if scales is None:
        steps = (at + tl.arange(0, STEP))[None, :]
        return tl.load(values + rows * K + steps, mask=_inside(steps < K, there), other=0.0)
    elif FORM is not None:
        # Triton 3.6 takes no element of a tuple as a constant argument.
        KIND: tl.constexpr = FORM[0]
        HEIGHT: tl.constexpr = FORM[1]
        WIDTH: tl.constexpr = FORM[2]
        return _scaled(values, scales, rows, there, at, K, STEP, KIND, HEIGHT, WIDTH)
    else:
        blocks = (at // 32 + tl.arange(0, STEP // 32))[None, :, None]
        inside = blocks < K // 32
        if there is not None:
            inside = inside & there[:, :, None]
        pairs = blocks * 16 + tl.arange(0, 16)[None, None, :]
        codes = tl.load(values + rows[:, :, None] * (K // 2) + pairs, mask=inside, other=0)
        byte = tl.load(scales + rows[:, :, None] * (K // 32) + blocks, mask=inside, other=0)
        byte = byte.to(tl.int32)
        # The byte is the exponent of a float32. 0 stands for 2^-127, which has no exponent.
        scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
        both = tl.interleave(_numbers(codes, scale), _numbers(codes >> 4, scale))
        return both.reshape([both.shape[0], STEP])
