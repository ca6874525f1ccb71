"""Numbers of codes in Gluon: what a thread makes of words of a DeviceMatrix, in few instructions.

decoding_triton.py says the same in Triton, and is the reference. The compiler moves halves of words
around there. Here the instructions for a word are given: a shift, one logical operation and one
addition for each two codes of four bits, all of them exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sidestep.kernels.quantized.decoding_triton import numbers


def _int4(kind: str, one: str, scaled: bool) -> str:
    """Return instructions for a word of eight codes, of which a register of halves is subtracted.

    one: the bits of 128 or 1024 twice, whose lowest bit counts 1. scaled: whether another register
    is multiplied.
    """
    lines = [".reg .b32 a, b, c, d;", "mov.b32 a, $4;"]
    lines += [f"shr.u32 {name}, $4, {4 * i};" for i, name in enumerate("abcd") if i]
    # (x & mask) | one.
    lines += [f"lop3.b32 {name}, {name}, 0x000F000F, {one}, 0xEA;" for name in "abcd"]
    for i, name in enumerate("abcd"):
        lines.append(f"add.rn.{kind} {name if scaled else f'${i}'}, {name}, $12;")
        lines += [f"mul.rn.{kind} ${i}, {name}, $20;"] * scaled
    return "{" + " ".join(lines) + "}"


def _fp8(kind: str, shift: int, mask: str, factor: str, scaled: bool) -> str:
    """Return instructions for a word of four codes of e4m3.

    An exponent moves to its place, and a multiplication corrects its bias.
    """
    lines = [".reg .b32 a, b, c, d, f;", f"mov.b32 f, {factor};", "shl.b32 c, $2, 8;"]
    lines += [f"shr.u32 a, $2, {shift};", f"shr.u32 b, c, {shift};"]
    lines += [f"and.b32 a, a, {mask};", f"and.b32 b, b, {mask};"]
    # (x & signs) | rest.
    lines += ["lop3.b32 a, $2, 0x80008000, a, 0xEA;", "lop3.b32 b, c, 0x80008000, b, 0xEA;"]
    for i, name in enumerate("ab"):
        lines.append(f"mul.rn.{kind} {name if scaled else f'${i}'}, {name}, f;")
        lines += [f"mul.rn.{kind} ${i}, {name}, $6;"] * scaled
    return "{" + " ".join(lines) + "}"


def _int8(kind: str, one: str, scaled: bool) -> str:
    """Return instructions for a word of four whole numbers.

    They are the lower seven bits, less 128 where the highest bit is set.
    """
    lines = [".reg .b32 a, b, c, d;", "shr.u32 a, $2, 8;", "mov.b32 b, $2;"]
    for name, high in (("a", "c"), ("b", "d")):
        lines.append(f"lop3.b32 {high}, {name}, 0x00800080, {one}, 0xEA;")
        lines.append(f"lop3.b32 {name}, {name}, 0x007F007F, {one}, 0xEA;")
    for i, (name, high) in enumerate((("a", "c"), ("b", "d"))):
        lines.append(f"sub.rn.{kind} {name if scaled else f'${i}'}, {name}, {high};")
        lines += [f"mul.rn.{kind} ${i}, {name}, $6;"] * scaled
    return "{" + " ".join(lines) + "}"


# Eight or four numbers of a word are in four or two registers. Inputs are the word, as many times,
# and then the halves that are added, and the scales.
_EIGHT = "=&r,=&r,=&r,=&r" + ",r" * 8
_FOUR = "=&r,=&r" + ",r" * 4
INT4 = gl.constexpr(_int4("bf16x2", "0x43004300", False))
INT4_SCALED = gl.constexpr(_int4("bf16x2", "0x43004300", True))
INT4_HALF = gl.constexpr(_int4("f16x2", "0x64006400", False))
INT4_HALF_SCALED = gl.constexpr(_int4("f16x2", "0x64006400", True))
FP8 = gl.constexpr(_fp8("bf16x2", 4, "0x07F007F0", "0x7B807B80", False))
FP8_SCALED = gl.constexpr(_fp8("bf16x2", 4, "0x07F007F0", "0x7B807B80", True))
FP8_HALF = gl.constexpr(_fp8("f16x2", 1, "0x3F803F80", "0x5C005C00", False))
FP8_HALF_SCALED = gl.constexpr(_fp8("f16x2", 1, "0x3F803F80", "0x5C005C00", True))
INT8 = gl.constexpr(_int8("bf16x2", "0x43004300", False))
INT8_SCALED = gl.constexpr(_int8("bf16x2", "0x43004300", True))
INT8_HALF = gl.constexpr(_int8("f16x2", "0x64006400", False))
INT8_HALF_SCALED = gl.constexpr(_int8("f16x2", "0x64006400", True))
_EIGHT_ADDED = gl.constexpr(_EIGHT + ",r" * 8)
_EIGHT_SCALED = gl.constexpr(_EIGHT + ",r" * 16)
_FOUR_ALONE = gl.constexpr(_FOUR)
_FOUR_SCALED = gl.constexpr(_FOUR + ",r" * 4)
_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
_PAIR_HALF = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
_ONE_REGISTER = gl.constexpr("=r,r")


@gluon.jit
def _fours(v):
    """Return v four times, in two new last dimensions."""
    v = gl.join(v, v)
    return gl.join(v, v)


@gluon.jit
def pairs_of(scale, dtype: gl.constexpr):
    """Return scales, rounded to 16 bits, twice in each word."""
    asm: gl.constexpr = _PAIR if dtype == gl.bfloat16 else _PAIR_HALF
    return gl.inline_asm_elementwise(asm, _ONE_REGISTER, [scale], gl.int32, True, 1)


@gluon.jit
def _run(
    asm: gl.constexpr, constraints: gl.constexpr, given, PACK: gl.constexpr, BRAIN: gl.constexpr
):
    """Return what instructions make of these registers, in the order in which they are given.

    They count as having effects: the compiler would else move them behind the next wait.
    """
    if BRAIN:
        v = gl.inline_asm_elementwise(asm, constraints, given, gl.bfloat16, False, PACK)
    else:
        v = gl.inline_asm_elementwise(asm, constraints, given, gl.float16, False, PACK)
    return v


@gluon.jit
def decoded(
    words,
    zero,
    scale,
    KIND: gl.constexpr,
    dtype: gl.constexpr,
    N: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Return what words [N, COLUMNS / numbers in a word] stand for, [N, COLUMNS], in 16 bits.

    zero: of int4, int32 [N], of all these columns; None where it is 8. scale: a register of pairs
    [N], as pairs_of gives it, which is multiplied; None for none. The words are whole pieces, or
    the first or second halves of pieces.
    """
    BRAIN: gl.constexpr = dtype == gl.bfloat16
    SCALED: gl.constexpr = scale is not None
    # Thread t of four has WORDS words of each piece, and word c has 16 or 32 columns.
    IN_WORD: gl.constexpr = 8 if KIND == "int4" else 4
    WORDS: gl.constexpr = 4 if COLUMNS % (16 * IN_WORD) == 0 else 2
    PIECES: gl.constexpr = COLUMNS // (4 * WORDS * IN_WORD)
    if KIND == "nf4" or KIND == "fp4":
        gl.static_assert(not SCALED)
        v = numbers(words, zero, KIND, dtype, N, COLUMNS)
    elif KIND == "int4":
        less = (words & 0) + (-1023360256 if BRAIN else -469703680)  # -128 or -1024, twice
        if zero is None:
            less += 0x00080008
        else:
            less += (zero * 0x00010001)[:, None]
        eights, less = _fours(words), _fours(less)
        eights, less = gl.join(eights, eights), gl.join(less, less)
        if SCALED:
            factor = _fours((words & 0) + scale[:, None])
            factor = gl.join(factor, factor)
            scaled4: gl.constexpr = INT4_SCALED if BRAIN else INT4_HALF_SCALED
            v = _run(scaled4, _EIGHT_SCALED, [eights, less, factor], 8, BRAIN)
        else:
            plain4: gl.constexpr = INT4 if BRAIN else INT4_HALF
            v = _run(plain4, _EIGHT_ADDED, [eights, less], 8, BRAIN)
        v = v.reshape(N, PIECES, 4, WORDS, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6)
    else:
        F8: gl.constexpr = KIND == "fp8"
        plain: gl.constexpr = (FP8 if F8 else INT8) if BRAIN else (FP8_HALF if F8 else INT8_HALF)
        scaled: gl.constexpr = (
            (FP8_SCALED if F8 else INT8_SCALED)
            if BRAIN
            else (FP8_HALF_SCALED if F8 else INT8_HALF_SCALED)
        )
        if SCALED:
            factor = _fours((words & 0) + scale[:, None])
            v = _run(scaled, _FOUR_SCALED, [_fours(words), factor], 4, BRAIN)
        else:
            v = _run(plain, _FOUR_ALONE, [_fours(words)], 4, BRAIN)
        v = v.reshape(N, PIECES, 4, WORDS, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return v.reshape(N, COLUMNS)


@gluon.constexpr_function
def words_layout(block_n: int, warps: int, words: int) -> gl.DistributedLinearLayout:
    """Return the layout in which threads have the words [block_n, words] of a tile.

    A thread has the words of which it can make its part of the tensor cores' first operand: those
    of columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16, of rows that are 8 apart. A piece of
    columns has 16 words; 8 words are those of the first or second half of a piece.
    """
    rows = [[8, 0]]
    for i in range((block_n // (16 * warps)).bit_length() - 1):
        rows.append([16 * warps << i, 0])
    lanes = [[1, 0], [2, 0], [4, 0]]
    turns = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    if words == 8:
        own, threads = [[0, 1], *rows], [[0, 2], [0, 4], *lanes]
    else:
        own, threads = [[0, 1], [0, 2], *rows], [[0, 4], [0, 8], *lanes]
    if words == 32:
        own.append([0, 16])
    return gl.DistributedLinearLayout(own, threads, turns, [], [block_n, words])
