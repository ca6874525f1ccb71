"""Products with coded experts in Triton: what becomes of a step of 128 columns.

The codes are decoded in registers, in the order in which the tensor cores take their first operand
(kernels/quantized/decoding_triton.py). Numbers of codes are exact in 16 bits. Where a step has one
scale, a few pairs' product is multiplied by it, in float32; else the numbers are. Scales of MXFP4
are powers of two, which change no digit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.quantized.decoding_triton import SIGNS, numbers, without_zero, zero_of

_E2M1 = tl.constexpr(-0x7E3F7E40)
"""A sign, two bits of an exponent and one digit of bfloat16, in both halves."""
_MOST_OF_E2M1 = tl.constexpr(-0x7E7F7E80)
"""The same without the digit."""


@triton.jit
def _e2m1(words, PLACE: tl.constexpr):
    """Return the bits of two of a word's numbers, as bfloat16 but for a factor, in its halves.

    PLACE: which two of eight, as `words_of_mxfp4` in expert_codes.py arranges them.
    """
    if PLACE == 0:
        return (words << 6) & _E2M1
    elif PLACE == 1:
        return (words << 2) & _E2M1
    elif PLACE == 2:
        return (((words >> 4) & 0x0FFFFFFF) | (words << 28)) & _E2M1
    else:
        return (words & _MOST_OF_E2M1) | ((words >> 8) & 0x00400040)


@triton.jit
def _halves(words, wide: tl.constexpr):
    """Return the two numbers of each word, bfloat16 by its bits, as a new last dimension."""
    if wide == tl.bfloat16:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))
    else:
        low, high = words << 16, words & -65536
        return tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))


@triton.jit
def mxfp4_numbers(
    words, scale, wide: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, SHORT: tl.constexpr
):
    """Return what the words of a step stand for, [N, STEP], times their scales.

    scale: the bytes of the step's scales, int32 [N]. SHORT: whether 2^63 is left to the caller, so
    that there is one multiplication. Scales below 2^-69 are then not exact.
    """
    byte = tl.join(tl.join(scale, scale >> 16), tl.join(scale >> 8, scale >> 24)).reshape(N, 4)
    byte &= 255
    first = tl.join(_e2m1(words, 0), _e2m1(words, 2))
    second = tl.join(_e2m1(words, 1), _e2m1(words, 3))
    # Columns are 32 c + 16 j + 8 half + 2 t + neighbour, where the word is 4 t + c. The dimensions
    # are t, c, j, half and, at last, neighbour. All numbers of a word share a scale, whose byte is
    # the exponent of a float32 or bfloat16. 0 stands for 2^-127, which has none.
    bits = tl.join(first, second).reshape(N, 4, 4, 2, 2)
    if SHORT:
        power = (byte + 63) * 0x00800080
        bits = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [bits, power[:, None, :, None, None], tl.full([], SIGNS, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        v = _halves(bits, wide)
    elif wide == tl.bfloat16:
        power = tl.maximum(byte << 7, 1 << 6).to(tl.int16).to(tl.bfloat16, bitcast=True)
        v = _halves(bits, wide) * (2.0**126) * power[:, None, :, None, None, None]
    else:
        power = tl.maximum(byte << 23, 1 << 22).to(tl.float32, bitcast=True)
        v = _halves(bits, wide) * (2.0**126) * power[:, None, :, None, None, None]
    return v.permute(0, 2, 3, 4, 1, 5).reshape(N, STEP).to(wide)


@triton.jit
def step_scales(scales, at, per_group, K: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales of a step: [N], or [N, STEP / GROUP] where it has several.

    scales: addresses [N] of the rows' scales of the first columns. per_group: scales of a group.
    """
    if GROUP >= STEP:
        return tl.load(scales + at // GROUP * per_group)
    else:
        group = (at // GROUP + tl.arange(0, STEP // GROUP))[None, :]
        return tl.load(scales[:, None] + group * per_group, mask=group * GROUP < K, other=0.0)


@triton.jit
def coded_dot(
    acc,
    codes,
    scale,
    zero,
    value,
    FORM: tl.constexpr,
    STEP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return acc [N, M] with the products of a step's codes [N, words] and value [M, STEP].

    scale: of the step. zero: of whole rows, or None. FEW: whether there are few pairs, so that
    products are scaled where they can be, not each number.
    """
    KIND: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[2]
    ZEROS: tl.constexpr = FORM[3]
    N: tl.constexpr = acc.shape[0]
    wide: tl.constexpr = value.dtype
    if KIND == "mxfp4":
        if FEW and wide == tl.bfloat16:
            w = mxfp4_numbers(codes, scale, wide, N, STEP, True)
            return acc + tl.dot(w, value.T, input_precision="ieee") * 2.0**63
        else:
            w = mxfp4_numbers(codes, scale, wide, N, STEP, False)
            return tl.dot(w, value.T, acc, input_precision="ieee")
    elif GROUP == 0:
        w = numbers(codes, zero, KIND, wide, N, STEP)
        return tl.dot(w, value.T, acc, input_precision="ieee")
    elif GROUP >= STEP:
        if ZEROS:
            zero, scale = zero_of(scale), without_zero(scale)
        w = numbers(codes, zero, KIND, wide, N, STEP)
        if FEW:
            return acc + tl.dot(w, value.T, input_precision="ieee") * scale[:, None]
        else:
            # float32 would take registers that are not there.
            w *= scale.to(wide)[:, None]
            return tl.dot(w, value.T, acc, input_precision="ieee")
    else:
        w = numbers(codes, None, KIND, wide, N, STEP)
        v = w.to(tl.float32).reshape(N, STEP // GROUP, GROUP)
        if ZEROS:
            v -= (zero_of(scale) - 8).to(tl.float32)[:, :, None]
            scale = without_zero(scale)
        v *= scale[:, :, None]
        return tl.dot(v.reshape(N, STEP).to(wide), value.T, acc, input_precision="ieee")


@triton.jit
def coded_product(
    values,
    known,
    words,
    scales,
    rows,
    there,
    expert,
    per_expert,
    K: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the products of rows of experts' matrices and a few inputs, [N, M].

    values: the inputs' addresses [M, 1]. known: which of them are read [M]. rows: of their expert's
    matrix [N]. there: which rows are read [N]; None for all. expert: of each row, or of all, int64.
    per_expert: rows of a matrix.
    """
    KIND: tl.constexpr = FORM[0]
    HEIGHT: tl.constexpr = FORM[1]
    GROUP: tl.constexpr = FORM[2]
    ZEROS: tl.constexpr = FORM[3]
    IN_WORD: tl.constexpr = 4 if KIND == "fp8" or KIND == "int8" else 8
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    W: tl.constexpr = STEPS * STEP // IN_WORD
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    N: tl.constexpr = rows.shape[0]
    M: tl.constexpr = known.shape[0]
    per_group = per_expert // HEIGHT
    source = words + ((expert * per_expert + rows) * W)[:, None]
    source += tl.arange(0, STEP // IN_WORD)[None, :]
    own = scales + expert * (GROUPS * per_group) + rows // HEIGHT
    columns = tl.arange(0, STEP)[None, :]
    acc = tl.zeros([N, M], tl.float32)
    scale, zero = own, None
    if GROUP == 0:
        scale = tl.load(own)
        if ZEROS:
            zero, scale = zero_of(scale), without_zero(scale)
    for at in tl.range(0, STEPS * STEP, STEP, num_stages=STAGES):
        inside = known[:, None]
        if K % STEP != 0:
            inside = inside & (at + columns < K)
        value = tl.load(values + at + columns, mask=inside, other=0.0)
        if there is None:
            codes = tl.load(source + at // IN_WORD)
        else:
            codes = tl.load(source + at // IN_WORD, mask=there[:, None], other=0)
        factor = scale if GROUP == 0 else step_scales(own, at, per_group, K, STEP, GROUP)
        acc = coded_dot(acc, codes, factor, zero, value, FORM, STEP, FEW)
    if GROUP == 0:
        acc *= scale[:, None]
    return acc
