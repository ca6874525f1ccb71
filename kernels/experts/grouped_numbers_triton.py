"""Sums of products with experts whose codes have scales of groups, in Triton.

The sums keep the groups apart as a dimension, so that no number changes its place: to bring groups
into rows, or to interleave the two numbers of a byte as a matrix has them, costs more than all
else. With four bits, the inputs are taken in pairs in its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of


@triton.jit
def _both_inputs(x, pairs, inside):
    """Return the inputs 2 p and 2 p + 1 for each pair p, in float32; 0 where it is not inside."""
    if x.dtype.scalar.element_ty == tl.float32:
        first = tl.load(x + 2 * pairs, mask=inside, other=0.0)
        second = tl.load(x + 2 * pairs + 1, mask=inside, other=0.0)
    else:
        both = tl.load(x.to(tl.pointer_type(tl.int32)) + pairs, mask=inside, other=0)
        if x.dtype.scalar.element_ty == tl.bfloat16:
            first = (both << 16).to(tl.float32, bitcast=True)
            second = (both & -65536).to(tl.float32, bitcast=True)
        else:
            first = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            second = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def grouped_zeros(N: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, IN_BYTE: tl.constexpr):
    """Return zeros for the sums of N rows. WIDTH: numbers that share a scale. IN_BYTE: 1 or 2."""
    HERE: tl.constexpr = STEP // WIDTH if WIDTH < STEP else 1
    return tl.zeros([N, HERE, STEP // HERE // IN_BYTE], tl.float32)


@triton.jit
def grouped_added(
    acc,
    values,
    scales,
    rows,
    there,
    x,
    at,
    K: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return acc with the products of STEP numbers from `at` on and their inputs.

    rows: of the matrix, int64 [N]. there: which of them are read [N]; None for all. x: the first
    input's address, or those of each row [N]. WIDTH, HEIGHT: columns and rows that share a scale.
    KIND: fp8 (of a GPU that has it), int8, int4, or mxfp4.
    """
    IN_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" else 1
    HERE: tl.constexpr = STEP // WIDTH if WIDTH < STEP else 1
    PART: tl.constexpr = STEP // HERE // IN_BYTE
    GROUPS: tl.constexpr = (K + WIDTH - 1) // WIDTH
    group = (at // WIDTH + tl.arange(0, HERE))[None, :, None]
    bytes_before = (at // IN_BYTE + tl.arange(0, HERE) * PART)[None, :, None]
    places = bytes_before + tl.arange(0, PART)[None, None, :]
    inside, known = places < K // IN_BYTE, group < GROUPS
    if there is not None:
        inside, known = inside & there[:, None, None], known & there[:, None, None]
    row = rows[:, None, None]
    kept = tl.load(scales + row // HEIGHT * GROUPS + group, mask=known, other=0)
    nothing: tl.constexpr = 0.0 if KIND == "fp8" else 0
    codes = tl.load(values + row * (K // IN_BYTE) + places, mask=inside, other=nothing)
    if x.type.is_block():
        x = x[:, None, None]
    if IN_BYTE == 1:
        first = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        added = codes.to(tl.float32) * first * kept
    else:
        first, second = _both_inputs(x, places, inside)
        codes = codes.to(tl.int32)
        if KIND == "mxfp4":
            # The sign, exponent and mantissa of e2m1 are those of a tiny float32, but for 2^126:
            # half of it goes with the inputs and half with the scale, whose byte is the exponent of
            # a float32, or 0 for 2^-127.
            low = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
            high = (((codes & 128) << 24) | ((codes & 112) << 18)).to(tl.float32, bitcast=True)
            byte = tl.minimum(kept.to(tl.int32), 127 + 64)
            scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True) * 2.0**63
            first, second = first * 2.0**63, second * 2.0**63
        else:
            # The lowest bits of 2^23 count 1.
            zero = zero_of(kept).to(tl.float32) + 8388608.0
            scale = without_zero(kept)
            low = ((codes & 15) | 0x4B000000).to(tl.float32, bitcast=True) - zero
            high = ((codes >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - zero
        added = (low * first + high * second) * scale
    return acc + added
