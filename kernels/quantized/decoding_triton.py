"""Numbers of codes in Triton: what a kernel makes of the words of a DeviceMatrix.

All of it is masks, shifts and one exact operation on two 16-bit numbers at a time. Words are in the
order of kernels/quantized/device_matrix.py, so the numbers come in the registers in which the
tensor cores take them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestep.kernels.quantized.coded_matrix import TABLES


def _fours(dtype: torch.dtype) -> tuple[int, ...]:
    """Return NormalFloat's 16 numbers, rounded to 16 bits, four in each integer of 64 bits."""
    rounded = torch.tensor(TABLES["nf4"]).to(dtype)
    return tuple(rounded.view(torch.int64).tolist())


SIGNS = tl.constexpr(-2147450880)
"""The highest bits of both halves of a word: 0x80008000."""
NF4_BRAIN = tl.constexpr(_fours(torch.bfloat16))
NF4_HALF = tl.constexpr(_fours(torch.float16))


@triton.jit
def zero_of(scale):
    """Return the zero that a scale's lowest four bits are, int32."""
    return scale.to(tl.int32, bitcast=True) & 15


@triton.jit
def without_zero(scale):
    """Return a scale whose lowest four bits are a zero, without that."""
    return (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)


@triton.jit
def _both(pairs, wide: tl.constexpr):
    """Return two numbers for each word, by the bits of its halves, as a new last dimension.

    The bits are float16 if `wide` is, else bfloat16.
    """
    if wide == tl.float32:
        low, high = pairs << 16, pairs & -65536
        return tl.join(low.to(wide, bitcast=True), high.to(wide, bitcast=True))
    else:
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return tl.join(low.to(wide, bitcast=True), high.to(wide, bitcast=True))


@triton.jit
def _quarters(words, SHIFT: tl.constexpr):
    """Return words, shifted right by 0, 1, 2 and 3 times SHIFT, in two new last dimensions."""
    return tl.join(tl.join(words, words >> SHIFT), tl.join(words >> 2 * SHIFT, words >> 3 * SHIFT))


@triton.jit
def _e4m3(words, wide: tl.constexpr):
    """Return the numbers of e4m3 codes, but for a factor."""
    both = tl.join(words, words << 8)
    if wide == tl.float16:
        return _both((both & SIGNS) | ((both >> 1) & 0x3F803F80), wide)
    else:
        return _both((both & SIGNS) | ((both >> 4) & 0x07F007F0), wide)


@triton.jit
def _int8(words, ONE: tl.constexpr, wide: tl.constexpr):
    """Return integers: the lower seven bits, less 128 where the highest bit is set."""
    both = tl.join(words >> 8, words)
    return _both((both & 0x007F007F) | ONE, wide) - _both((both & 0x00800080) | ONE, wide)


@triton.jit
def _e2m1(words, wide: tl.constexpr):
    """Return the numbers of e2m1 codes, but for a factor."""
    codes = _quarters(words, 4)
    if wide == tl.float16:
        return _both(((codes & 0x00080008) << 12) | ((codes & 0x00070007) << 9), wide)
    else:
        return _both(((codes & 0x00080008) << 12) | ((codes & 0x00070007) << 6), wide)


@triton.jit
def _normal_float(words, wide: tl.constexpr):
    """Return the numbers of NormalFloat codes, looked up among 64-bit constants.

    Each constant has four numbers of 16 bits, bfloat16 as such or float16.
    """
    codes = _quarters(words, 4)
    codes = tl.join(codes & 15, (codes >> 16) & 15)
    HALF: tl.constexpr = wide == tl.float16
    FOURS: tl.constexpr = NF4_HALF if HALF else NF4_BRAIN
    second = (codes & 4) != 0
    lower = tl.where(second, tl.full([], FOURS[1], tl.int64), tl.full([], FOURS[0], tl.int64))
    upper = tl.where(second, tl.full([], FOURS[3], tl.int64), tl.full([], FOURS[2], tl.int64))
    four = tl.where((codes & 8) != 0, upper, lower)
    found = four >> ((codes & 3) * 16).to(tl.int64)
    return found.to(tl.int16).to(tl.float16 if HALF else tl.bfloat16, bitcast=True)


@triton.jit
def numbers(
    words, zero, KIND: tl.constexpr, wide: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return what the words [N, COLUMNS / numbers in a word] stand for, [N, COLUMNS], in `wide`.

    zero: of int4, int32 [N], of all these columns; None where it is 8. wide: bfloat16, float16, or
    float32 with the numbers that bfloat16 has.
    """
    # The bits of 128 or 1024 twice, whose lowest bit counts 1.
    ONE: tl.constexpr = 0x64006400 if wide == tl.float16 else 0x43004300
    OFFSET: tl.constexpr = 1024.0 if wide == tl.float16 else 128.0
    if KIND == "fp8":
        # The exponent's bias is 7 in place of 15 or 127. Numbers below the least exponent stay so.
        v = _e4m3(words, wide) * (256.0 if wide == tl.float16 else 2.0**120)
    elif KIND == "int8":
        v = _int8(words, ONE, wide)
    elif KIND == "fp4":
        v = _e2m1(words, wide) * (16384.0 if wide == tl.float16 else 2.0**126)
    elif KIND == "nf4":
        v = _normal_float(words, wide).to(wide)
    else:
        codes = _quarters(words, 4) & 0x000F000F
        if zero is None:
            v = _both(codes | ONE, wide) - (OFFSET + 8.0)
        else:
            # Zeros are subtracted from two codes at once, and 16 added, which leaves no borrow.
            sixteen = (words & 0) + (ONE + (16 - zero) * 0x00010001)[:, None]
            sixteen = tl.join(tl.join(sixteen, sixteen), tl.join(sixteen, sixteen))
            v = _both(codes + sixteen, wide) - (OFFSET + 16.0)
    if KIND == "fp8" or KIND == "int8":
        v = v.reshape(N, COLUMNS // 64, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    else:
        v = v.reshape(N, COLUMNS // 128, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 4, 2, 6)
    return v.reshape(N, COLUMNS)
