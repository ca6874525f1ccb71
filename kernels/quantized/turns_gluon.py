"""Products of codes straight from memory's words, for kernels of a few rows: a warp's turns.

- A thread loads the words of which it makes its part of the tensor cores' first operand, 16 bytes
  at a time: into registers, several steps of 128 columns ahead, or all of them into its own places
  of shared memory. So no barrier stands between steps.
- Warps have rows or columns of their own. Each adds its own steps, and what they have to add up
  they exchange once, at the end.
- The second operand's eight columns are inputs. A column of the result does not depend on the
  others.

A *turn* is one step of each warp. All of it is written in Gluon, Triton's lower level, because
Triton can express none of these layouts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestep.kernels.quantized.decoding_gluon import decoded
from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of

# Triton 3.9 has these by other names than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)


def _mxfp4() -> str:
    """Return instructions for a word of eight codes of e2m1, and a power of two for each two.

    Words are those of ExpertCodes.of_mxfp4: a code's three lower bits become the highest of a
    bfloat16's exponent and digits, but for a factor, which the power of two has.
    """
    lines = [".reg .b32 a, b, c, d;", "shl.b32 a, $4, 6;", "shl.b32 b, $4, 2;"]
    lines += ["shf.r.wrap.b32 c, $4, $4, 4;", "shr.u32 d, $4, 8;", "and.b32 d, d, 0x00400040;"]
    lines += [f"and.b32 {name}, {name}, 0x81C081C0;" for name in "abc"]
    # (x & three bits) | the fourth.
    lines.append("lop3.b32 d, $4, 0x81808180, d, 0xEA;")
    lines += [f"mul.rn.bf16x2 ${i}, {name}, $12;" for i, name in enumerate("abcd")]
    return "{" + " ".join(lines) + "}"


_MXFP4 = gl.constexpr(_mxfp4())
_WORD_AND_POWER = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 16)


@gluon.constexpr_function
def words_of_warps(rows: int, warps: int, words: int) -> gl.DistributedLinearLayout:
    """Return the layout in which threads have the words [warps * rows, words] of a turn.

    Each warp has rows of its own, and a thread what it needs of the tensor cores' first operand:
    see `words_layout` in decoding_gluon.py.
    """
    own = [[0, 1], [0, 2], [8, 0]] + [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    if words == 32:
        own.append([0, 16])
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    turns = [[rows << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, turns, [], [warps * rows, words])


@gluon.constexpr_function
def copies_of_warps(rows: int, warps: int, words: int) -> gl.DistributedLinearLayout:
    """Return the layout in which threads copy the words [warps * rows, words] of a turn.

    Each warp has its own rows, as in `words_of_warps`, but eight threads copy 128 bytes of a row
    at once, if a row has as many.
    """
    if words == 16:
        return words_of_warps(rows, warps, words)
    own = [[0, 1], [0, 2]] + [[4 << i, 0] for i in range((rows // 4).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
    turns = [[rows << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, lanes, turns, [], [warps * rows, words])


@gluon.constexpr_function
def products_of_warps(warps: int) -> gl.NVMMADistributedLayout:
    """Return the layout of products [warps, rows, columns]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def words_in_step(kind: str) -> int:
    """Return the words of a row in 128 columns."""
    return 32 if kind in ("fp8", "int8") else 16


@gluon.jit
def no_turns():
    """Return an empty tuple of turns."""
    return ()


@gluon.jit
def ask_for_line(
    kept,
    x,
    SPLIT: gl.constexpr,
    FIRST: gl.constexpr,
    EVERY: gl.constexpr,
    turn,
    K: gl.constexpr,
    row=None,
):
    """Copy a turn's inputs to shared memory, [warps, 128]; those behind column K are 0.

    Warp w has the step w % SPLIT * FIRST + turn * EVERY, of the row of x that is `row`
    [warps] numbers behind the first, or of the only one.
    """
    WARPS: gl.constexpr = kept.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    step = warp % SPLIT * FIRST + turn * EVERY
    column = step[:, None] * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    source = x + column
    if row is not None:
        source += row[:, None]
    if K % (128 * SPLIT) == 0:
        _load(kept, source)
    else:
        _load(kept, source, mask=column < K)


@gluon.jit
def inputs_are_there():
    """Wait until all inputs are in shared memory."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    _barrier()


@gluon.jit
def _eights(v):
    """Return v eight times, in three new last dimensions."""
    v = gl.join(v, v)
    v = gl.join(v, v)
    return gl.join(v, v)


@gluon.jit
def _mxfp4_numbers(words, scale, N: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the numbers of words [N, COLUMNS / 8] of MXFP4 times their scales, less 2^63.

    scale: int32 [N], the bytes of the step's four scales, the exponents of powers of two. Scales
    below 2^-69 are not exact.
    """
    # Word 4 t + c has thread t's numbers of the group c.
    group = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, words.type.layout)) % 4
    byte = (scale[:, None] >> (group * 8)[None, :]) & 255
    power = (byte + 63) * 0x00800080
    given = [_eights(words), _eights(power)]
    v = gl.inline_asm_elementwise(_MXFP4, _WORD_AND_POWER, given, gl.bfloat16, False, 8)
    v = v.reshape(N, COLUMNS // 128, 4, 4, 2, 2, 2).permute(0, 1, 3, 4, 5, 2, 6)
    return v.reshape(N, COLUMNS)


@gluon.constexpr_function
def _parent(layout: gl.SliceLayout) -> gl.DistributedLinearLayout:
    """Return the layout of words whose rows have this one."""
    return layout.parent


@gluon.jit
def _ask(place, turn, EVERY: gl.constexpr, STEPS: gl.constexpr, FORM: gl.constexpr):
    """Load a turn's words, and its scales if steps have them."""
    words, source, scales, first, per_group = place
    WORDS: gl.constexpr = words_in_step(FORM[0])
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, _parent(source.type.layout)))
    # Behind the last step the inputs are 0, so that any numbers do.
    step = gl.minimum(first + turn * EVERY, STEPS - 1)
    found = gl.load(words + (source + step * WORDS)[:, None] + word[None, :])
    scale = first
    if FORM[2] > 0:
        scale = gl.load(scales + step * 128 // FORM[2] * per_group)
    return found, scale


@gluon.jit
def ask_first(
    place, EVERY: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr
):
    """Ask for the first turns' words and scales, and return them.

    place: the words; each row's [N] first word; the addresses of its first scale; its warp's first
    step; and the scales of a group of columns. EVERY: steps from one turn of a warp to the next.
    FORM: the kind of codes, the rows and columns that share a scale, and whether scales have zeros
    in their lowest bits. Columns are 0 where all of a row share a scale.
    """
    asked = no_turns()
    for turn in gl.static_range(STAGES):
        asked = asked + (_ask(place, turn, EVERY, STEPS, FORM),)
    return asked


@gluon.jit
def by_row(v, WARPS: gl.constexpr):
    """Return numbers of rows [N] as the products [warps, rows, columns] have them."""
    ROWS: gl.constexpr = v.shape[0] // WARPS
    layout: gl.constexpr = gl.SliceLayout(2, products_of_warps(WARPS))
    return gl.expand_dims(gl.convert_layout(v.reshape(WARPS, ROWS), layout), 2)


@gluon.jit
def _with_turn(acc, words, scale, value, FORM: gl.constexpr, APART: gl.constexpr):
    """Return acc [warps, rows, columns] with the products of a turn's words and their inputs.

    scale: of the rows, of this turn or of all. APART: whether the products of a turn are summed by
    themselves first; where turns have scales they are in any case.
    """
    KIND: gl.constexpr = FORM[0]
    GROUP: gl.constexpr = FORM[2]
    WARPS: gl.constexpr = acc.shape[0]
    N: gl.constexpr = words.shape[0]
    FIRST: gl.constexpr = gl.DotOperandLayout(0, products_of_warps(WARPS), 2)
    zero = None
    if FORM[3]:
        zero, scale = zero_of(scale), without_zero(scale)
    if KIND == "mxfp4":
        v = _mxfp4_numbers(words, scale, N, 128)
    else:
        v = decoded(words, zero, None, KIND, value.dtype, N, 128)
    v = gl.convert_layout(v.reshape(WARPS, N // WARPS, 128), FIRST, assert_trivial=True)
    if GROUP == 0 and not APART:
        acc = mma_v2(v, value, acc)
    else:
        nothing = gl.zeros(acc.shape, gl.float32, products_of_warps(WARPS))
        product = mma_v2(v, value, nothing)
        acc += product if KIND == "mxfp4" or GROUP == 0 else product * by_row(scale, WARPS)
    return acc


@gluon.jit
def second_operand(kept, COLUMNS: gl.constexpr):
    """Return a turn's inputs as the second operand, [warps, 128, columns].

    Inputs without columns, [warps, 128], are those of all of them.
    """
    WARPS: gl.constexpr = kept.shape[0]
    SECOND: gl.constexpr = gl.DotOperandLayout(1, products_of_warps(WARPS), 2)
    if len(kept.shape) == 3:
        v = kept.permute([0, 2, 1]).load(SECOND)
    else:
        v = gl.expand_dims(kept.load(gl.SliceLayout(2, SECOND)), 2)
        v, _ = gl.broadcast(v, gl.zeros([WARPS, 128, COLUMNS], kept.dtype, SECOND))
    return v


@gluon.jit
def sum_of_turns(
    acc,
    place,
    asked,
    kept,
    EVERY: gl.constexpr,
    STEPS: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    APART: gl.constexpr = False,
):
    """Return acc [warps, rows, 8] with the products of all turns.

    place, asked: as of ask_first. kept: the turns' inputs in shared memory, [turns, warps, 128] or
    [turns, warps, 8, 128].
    """
    scale = place[3]
    if FORM[2] == 0:
        scale = gl.load(place[2])
    # Turns that share a loop leave their registers to those of the next round.
    LOOPED: gl.constexpr = (TURNS // STAGES - 1) * STAGES if TURNS > 12 else 0
    for start in range(0, LOOPED, STAGES):
        following = no_turns()
        for turn in gl.static_range(STAGES):
            words, own = asked[turn]
            following = following + (_ask(place, start + turn + STAGES, EVERY, STEPS, FORM),)
            own = own if FORM[2] > 0 else scale
            acc = _with_turn(
                acc, words, own, second_operand(kept.index(start + turn), 8), FORM, APART
            )
        asked = following
    for turn in gl.static_range(LOOPED, TURNS):
        words, own = asked[0]
        asked = asked[1:]
        if turn + STAGES < TURNS:
            asked = asked + (_ask(place, turn + STAGES, EVERY, STEPS, FORM),)
        own = own if FORM[2] > 0 else scale
        acc = _with_turn(acc, words, own, second_operand(kept.index(turn), 8), FORM, APART)
    return _scaled(acc, scale, FORM)


@gluon.constexpr_function
def kept_words_layout(words: int) -> gl.SwizzledSharedLayout:
    """Return the layout of words in shared memory whose loads, 16 bytes a thread, do not meet."""
    return gl.SwizzledSharedLayout(4, 1 if words == 32 else 2, words // 4, [1, 0])


@gluon.jit
def keep_turns(
    place,
    copied,
    memory,
    EVERY: gl.constexpr,
    STEPS: gl.constexpr,
    TURNS: gl.constexpr,
    FORM: gl.constexpr,
):
    """Copy the words of all turns to shared memory [turns, N, words], and return their scales.

    copied: each row's [N] first word and its warp's first step, in any layout. Where it is not that
    of the words which a thread will use, a barrier must come before they are used. Other arguments
    are as of ask_first.
    """
    words, _, scales, first, per_group = place
    source, step_of = copied
    WORDS: gl.constexpr = words_in_step(FORM[0])
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, _parent(source.type.layout)))
    kept = no_turns()
    for turn in gl.static_range(TURNS):
        step = gl.minimum(step_of + turn * EVERY, STEPS - 1)
        _load(memory.index(turn), words + (source + step * WORDS)[:, None] + word[None, :])
        scale = first
        if FORM[2] > 0:
            own = gl.minimum(first + turn * EVERY, STEPS - 1)
            scale = gl.load(scales + own * 128 // FORM[2] * per_group)
        kept = kept + (scale,)
    async_copy.commit_group()
    return kept


@gluon.jit
def sum_of_kept(
    acc,
    place,
    turn_scales,
    memory,
    kept,
    TURNS: gl.constexpr,
    FORM: gl.constexpr,
    APART: gl.constexpr = False,
):
    """Return what sum_of_turns does, of words that keep_turns has copied, in the same order."""
    WARPS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = place[1].shape[0] // WARPS
    LAYOUT: gl.constexpr = words_of_warps(ROWS, WARPS, words_in_step(FORM[0]))
    scale = place[3]
    if FORM[2] == 0:
        scale = gl.load(place[2])
    for turn in gl.static_range(TURNS):
        own = turn_scales[turn] if FORM[2] > 0 else scale
        words = memory.index(turn).load(LAYOUT)
        acc = _with_turn(acc, words, own, second_operand(kept.index(turn), 8), FORM, APART)
    return _scaled(acc, scale, FORM)


@gluon.jit
def _scaled(acc, scale, FORM: gl.constexpr):
    """Return the sum of all turns times the scale that they share."""
    if FORM[0] == "mxfp4":
        acc *= 2.0**63
    elif FORM[2] == 0:
        if FORM[3]:
            scale = without_zero(scale)
        acc *= by_row(scale, acc.shape[0])
    return acc


@gluon.jit
def same_columns(acc):
    """Return one of the columns of acc [warps, rows, 8], which are all the same."""
    WARPS: gl.constexpr = acc.shape[0]
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, products_of_warps(WARPS)))
    column = gl.arange(0, 8, layout=OF_COLUMNS)
    column = gl.expand_dims(gl.expand_dims(column, 0), 0)
    return gl.sum(gl.where(column == 0, acc, 0.0), 2)
