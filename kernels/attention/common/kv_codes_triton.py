"""Codes of keys and values in Triton: the blocks that have them, and how they are made and read.

The reference is kernels/ops/kv_quantization.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class CodedCache:
    """A layer's blocks of codes.

    codes: [blocks, 2 KVH, block size, bytes of a head], the keys' heads first, int8 or else uint8;
    numbers: float16 [blocks, 2 KVH, block size], the scales, or for int4 [blocks, 2, 2 KVH, block
    size], scales and then codes of zero. Only blocks may lie apart. format: "int8", "fp8", "int4",
    or "fp8_bits" for GPUs that do not convert e4m3. A byte of int4 has dimension i in its lower
    bits and i + D / 2 in the others, so D must be a power of two.
    """

    codes: Tensor
    numbers: Tensor
    format: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the keys and values: blocks, 2 KVH, block size, D."""
        blocks, heads, page, width = self.codes.shape
        return blocks, heads, page, 2 * width if self.format == "int4" else width

    def stride(self, dim: int) -> int:
        """Return the stride of the codes."""
        return self.codes.stride(dim)


def parts_of(cache: Tensor | CodedCache) -> tuple[Tensor, Tensor | None, int, str]:
    """Return what kernels take of a cache: values or codes, numbers, their stride, and format.

    The format of a cache without codes is "".
    """
    if isinstance(cache, CodedCache):
        return cache.codes, cache.numbers, cache.numbers.stride(0), cache.format
    return cache, None, 0, ""


@triton.jit
def rounded_up(scale):
    """Return the next number of float16 that is not below a scale."""
    half = tl.minimum(scale, 65504.0).to(tl.float16)
    above = (half.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    is_below = (half.to(tl.float32) < scale) & (half.to(tl.float32) < 65504.0)
    return tl.where(is_below, above, half)


@triton.jit
def quotient(x, scale):
    """Return x / scale, and 0 where the scale is 0 and x is too."""
    return x / tl.where(scale > 0.0, scale, 1.0)


@triton.jit
def _e4m3(x):
    """Return the bits of the nearest numbers of e4m3, for |x| up to 448: uint8."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of the 23 bits behind the point go; ties go to even.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    return (code | tl.where(x < 0.0, 128, 0)).to(tl.uint8)


@triton.jit
def code_of(x, scale, FORMAT: tl.constexpr):
    """Return the codes of 8 bits of numbers that are at most the largest code times the scale."""
    ratio = quotient(x, scale)
    if FORMAT == "int8":
        return tl.floor(tl.minimum(tl.maximum(ratio, -127.0), 127.0) + 0.5).to(tl.int8)
    else:
        return _e4m3(ratio)


@triton.jit
def store_coded(
    codes,
    numbers,
    low,
    high,
    place,
    heads,
    writes,
    block_stride,
    numbers_stride,
    given,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store a token's heads at `place` of the slot mapping.

    given: float16 [HEADS], scales that replace those of the heads where they are not 0, or None.
    low, high [N, HALF]: both halves of heads [N, 1] among the HEADS of a block, 0 behind D / 2;
    writes [N, 1]: whether the head is stored.
    """
    low, high = low.to(tl.float32), high.to(tl.float32)
    dims = tl.arange(0, HALF)[None, :]
    WIDTH: tl.constexpr = D // 2 if FORMAT == "int4" else D
    target = codes + (place // PAGE) * block_stride + heads * (PAGE * WIDTH) + dims
    target += (place % PAGE) * WIDTH
    number = numbers + (place // PAGE) * numbers_stride + heads * PAGE + place % PAGE
    inside = writes & (dims < D // 2)
    if FORMAT == "int4":
        least = tl.minimum(tl.minimum(tl.min(low, 1), tl.min(high, 1)), 0.0)[:, None]
        most = tl.maximum(tl.maximum(tl.max(low, 1), tl.max(high, 1)), 0.0)[:, None]
        half = rounded_up((most - least) / 15.0)
        scale = half.to(tl.float32)
        zero = tl.minimum(tl.floor(quotient(-least, scale) + 0.5), 15.0)
        first = tl.floor(quotient(low, scale) + zero + 0.5)
        second = tl.floor(quotient(high, scale) + zero + 0.5)
        first = tl.minimum(tl.maximum(first, 0.0), 15.0).to(tl.uint8)
        second = tl.minimum(tl.maximum(second, 0.0), 15.0).to(tl.uint8)
        tl.store(target, first | (second << 4), mask=inside)
        tl.store(number + HEADS * PAGE, zero.to(tl.float16), mask=writes)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
        top = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))[:, None]
        half = rounded_up(top / LARGEST)
        if given is not None:
            own = tl.load(given + heads, mask=writes, other=0.0)
            half = tl.where(own > 0.0, own, half)
        scale = half.to(tl.float32)
        tl.store(target, code_of(low, scale, FORMAT), mask=inside)
        tl.store(target + D // 2, code_of(high, scale, FORMAT), mask=inside)
    tl.store(number, half, mask=writes)


@triton.jit
def _load_head(
    codes,
    numbers,
    blocks,
    keys,
    head,
    there,
    block_stride,
    numbers_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return the codes of one head of keys [N] as numbers [N, DIM], and their scales [N].

    They are 0 where keys are not there. A number times its scale is what was stored; such numbers
    are exact in 16 bits.
    """
    WIDTH: tl.constexpr = D // 2 if FORMAT == "int4" else D
    columns = tl.arange(0, DIM)
    blocks = blocks.to(tl.int64)
    place = blocks * block_stride + head * (PAGE * WIDTH) + (keys % PAGE) * WIDTH
    readable = there[:, None] & (columns < D)[None, :]
    # Both halves of int4 read the same bytes, each for itself. Triton 3.6 gives the wrong numbers
    # to the tensor cores if bytes are read once, and their halves then joined.
    code = tl.load(codes + place[:, None] + (columns % WIDTH)[None, :], mask=readable, other=0)
    number = numbers + blocks * numbers_stride + head * PAGE + keys % PAGE
    scale = tl.load(number, mask=there, other=0.0).to(tl.float32)
    if FORMAT == "int4":
        zero = tl.load(number + HEADS * PAGE, mask=there, other=0.0)
        code = (code >> (columns // WIDTH * 4)[None, :].to(tl.uint8)) & 15
        result = (code.to(tl.float16) - zero[:, None]).to(dtype)
    elif FORMAT == "fp8":
        result = code.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == "fp8_bits":
        # The exponent of float16 has 8 more in its middle; numbers below 2^-6 are right too.
        wide = code.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        result = (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        result = code.to(dtype)
    return result, scale


@triton.jit
def load_coded(
    codes,
    numbers,
    blocks,
    keys,
    head,
    there,
    block_stride,
    numbers_stride,
    KVH: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return keys and their scales, and values and their scales, of one KV head: see _load_head."""
    key, key_scale = _load_head(
        codes,
        numbers,
        blocks,
        keys,
        head,
        there,
        block_stride,
        numbers_stride,
        2 * KVH,
        D,
        DIM,
        PAGE,
        FORMAT,
        dtype,
    )
    value, value_scale = _load_head(
        codes,
        numbers,
        blocks,
        keys,
        head + KVH,
        there,
        block_stride,
        numbers_stride,
        2 * KVH,
        D,
        DIM,
        PAGE,
        FORMAT,
        dtype,
    )
    return key, key_scale, value, value_scale


@triton.jit
def times_scales(weights, value, scale, dtype: tl.constexpr):
    """Return weights [M, N] and values [N, DIM] for a product, with the values' scales in one.

    A weight times a scale may be too small for float16, whose values thus take the scales.
    """
    if dtype == tl.float16:
        value = (value.to(tl.float32) * scale[:, None]).to(dtype)
    else:
        weights = weights * scale[None, :]
    return weights.to(dtype), value
