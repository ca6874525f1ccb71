"""Tiles of codes of 8 bits of keys and values, in decode attention on GPUs that have PDL.

- Codes stay codes until a thread has them in registers, in the order in which the tensor cores take
  their first operand. Neither keys nor values pass through shared memory a second time. A key's
  dimensions may have any order, if the query's have the same. So a thread reads 16 bytes at once.
- Numbers are float16, in which all codes are exact and which are made two at a time. A power of two
  brings the queries into its range.
- Each warp has keys of its own, and a softmax of its own: warps meet at the end of a row alone.
- Keys are the rows of both products, and the query heads their few columns. So only the heads that
  fill up 8 columns are computed in vain.
- A weight times the scale of its value must fit float16. So the highest score counts the scale: it
  is the highest product of the two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestep.kernels.attention.common.scores_triton import bounded

# Triton 3.9 has this by another name than 3.6.
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)

LOWEST = gl.constexpr(-3.0e38)
"""A number below all scores."""
LEAST_SCALE = gl.constexpr(2.0**-24)
"""The least scale above 0."""

_FP8 = gl.constexpr(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
# A whole number and 128 are the lower bits of 1024 and more in float16.
_INT8 = gl.constexpr(
    "{ .reg .b32 a, m, l, h; mov.b32 m, 0x64646464; xor.b32 a, $2, 0x80808080;"
    " prmt.b32 l, a, m, 0x4140; prmt.b32 h, a, m, 0x4342; mov.b32 m, 0x64806480;"
    " sub.rn.f16x2 $0, l, m; sub.rn.f16x2 $1, h, m; }"
)
_FOUR = gl.constexpr("=&r,=&r,r,r,r,r")
# Pairs of the codes of two keys, each four dimensions.
_FP8_PAIRS = gl.constexpr(
    "{ .reg .b32 a, b; .reg .b16 k, l, m, n; prmt.b32 a, $4, $12, 0x5140;"
    " prmt.b32 b, $4, $12, 0x7362; mov.b32 {k, l}, a; mov.b32 {m, n}, b;"
    " cvt.rn.f16x2.e4m3x2 $0, k; cvt.rn.f16x2.e4m3x2 $1, l;"
    " cvt.rn.f16x2.e4m3x2 $2, m; cvt.rn.f16x2.e4m3x2 $3, n; }"
)
_INT8_PAIRS = gl.constexpr(
    "{ .reg .b32 a, b, c, d, e, f, m; mov.b32 m, 0x64646464;"
    " prmt.b32 a, $4, $12, 0x5140; prmt.b32 b, $4, $12, 0x7362;"
    " xor.b32 a, a, 0x80808080; xor.b32 b, b, 0x80808080;"
    " prmt.b32 c, a, m, 0x4140; prmt.b32 d, a, m, 0x4342;"
    " prmt.b32 e, b, m, 0x4140; prmt.b32 f, b, m, 0x4342; mov.b32 m, 0x64806480;"
    " sub.rn.f16x2 $0, c, m; sub.rn.f16x2 $1, d, m;"
    " sub.rn.f16x2 $2, e, m; sub.rn.f16x2 $3, f, m; }"
)
_EIGHT = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 16)


@gluon.constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@gluon.constexpr_function
def _key_layout(tile: int, words: int, warps: int) -> gl.DistributedLinearLayout:
    """Return the layout in which threads have words [tile, words] of keys.

    Thread t of four has consecutive words of rows that are 8 apart.
    """
    own = [[0, 1 << i] for i in range(_log2(words // 4))]
    own += [[8 << i, 0] for i in range(_log2(tile // (8 * warps)))]
    lanes = [[0, words // 4], [0, words // 2], [1, 0], [2, 0], [4, 0]]
    turns = [[tile // warps << i, 0] for i in range(_log2(warps))]
    return gl.DistributedLinearLayout(own, lanes, turns, [], [tile, words])


@gluon.constexpr_function
def _value_layout(tile: int, words: int, warps: int) -> gl.DistributedLinearLayout:
    """Return the layout in which threads have words [tile, words] of values.

    Thread t of each four has rows 2 t and 2 t + 1 of each 8. The fours have consecutive words.
    """
    own = [[1, 0]] + [[0, 1 << i] for i in range(_log2(words // 8))]
    own += [[8 << i, 0] for i in range(_log2(tile // (8 * warps)))]
    lanes = [[2, 0], [4, 0]] + [[0, words // 8 << i] for i in range(3)]
    turns = [[tile // warps << i, 0] for i in range(_log2(warps))]
    return gl.DistributedLinearLayout(own, lanes, turns, [], [tile, words])


@gluon.jit
def _first_keys(words, FORMAT: gl.constexpr, W: gl.constexpr, FIRST: gl.constexpr):
    """Return words [tile, words] of keys as the first operand, [W, tile / W, dimensions].

    Dimension 4 * word + byte, where word is t * C + c, has the place c * 16 + byte // 2 * 8 +
    t * 2 + byte % 2: see _placed.
    """
    TW: gl.constexpr = words.shape[0] // W
    C: gl.constexpr = words.shape[1] // 4
    v = gl.join(words, words)
    v = gl.join(v, v)
    asm: gl.constexpr = _FP8 if FORMAT == "fp8" else _INT8
    v = gl.inline_asm_elementwise(asm, _FOUR, [v], gl.float16, True, 4)
    v = v.reshape(W, TW, 4, C, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(W, TW, 16 * C)
    return gl.convert_layout(v, FIRST, assert_trivial=True)


@gluon.jit
def _first_values(words, FORMAT: gl.constexpr, W: gl.constexpr, FIRST: gl.constexpr):
    """Return words [tile, words] of values as the first operand, [W, dimensions, tile / W].

    Dimension g * D / 8 + 2 * j + r has the place j * 16 + r * 8 + g.
    """
    PAIRS: gl.constexpr = words.shape[0] // 2
    WORDS: gl.constexpr = words.shape[1]
    a, b = words.reshape(PAIRS, 2, WORDS).permute(0, 2, 1).split()
    a, b = gl.join(a, a), gl.join(b, b)
    a, b = gl.join(a, a), gl.join(b, b)
    a, b = gl.join(a, a), gl.join(b, b)
    asm: gl.constexpr = _FP8_PAIRS if FORMAT == "fp8" else _INT8_PAIRS
    v = gl.inline_asm_elementwise(asm, _EIGHT, [a, b], gl.float16, True, 8)
    v = v.reshape(W, PAIRS // W, 8, WORDS // 8, 2, 2, 2).permute(0, 3, 4, 5, 2, 1, 6)
    v = v.reshape(W, 4 * WORDS, 2 * PAIRS // W)
    return gl.convert_layout(v, FIRST, assert_trivial=True)


@gluon.jit
def _second_weights(weights, SECOND: gl.constexpr):
    """Return weights [W, keys, heads], as the tensor cores gave the scores, as second operand.

    Threads exchange them: the instruction transposes each 8 x 8.
    """
    W: gl.constexpr = weights.shape[0]
    KEYS: gl.constexpr = weights.shape[1]
    HEADS: gl.constexpr = weights.shape[2]
    v = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights], gl.float16, False, 2
    )
    v = v.reshape(W, KEYS // 8, 8, HEADS // 8, 8).permute(0, 1, 4, 3, 2)
    return gl.convert_layout(v.reshape(W, KEYS, HEADS), SECOND, assert_trivial=True)


@gluon.jit
def _log2_of(x):
    """Return log2(x), for x in the range of float16, to some 22 bits."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _placed(q, HEADS: gl.constexpr, D: gl.constexpr):
    """Return q [HEADS, D] with its dimensions where _first_keys has those of keys."""
    return q.reshape(HEADS, 4, D // 16, 2, 2).permute(0, 2, 3, 1, 4).reshape(HEADS, D)


@gluon.jit
def ask_for_codes(
    codes,
    keys,
    values,
    block,
    index,
    head,
    length,
    block_stride,
    KVH: gl.constexpr,
    WORDS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Copy a tile's codes to shared memory. Codes behind the last token become 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // WORDS, WORDS // 4], [num_warps, 1], [1, 0]
    )
    key = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT))
    begin = codes + block.to(gl.int64) * block_stride + head * (PAGE * WORDS)
    begin += index * TILE % PAGE * WORDS
    source = begin + key[:, None] * WORDS + word[None, :]
    there = (index * TILE + key < length)[:, None] & (word >= 0)[None, :]
    _load(keys, source, mask=there)
    _load(values, source + KVH * (PAGE * WORDS), mask=there)


@gluon.jit
def scales_of(numbers, block, index, head, within, length, stride, KVH, PAGE, TILE):
    """Return the scales of a tile's keys and values, 0 behind the last token."""
    place = numbers + block.to(gl.int64) * stride + head * PAGE + index * TILE % PAGE + within
    there = index * TILE + within < length
    key_scale = gl.load(place, mask=there, other=0.0)
    return key_scale, gl.load(place + KVH * PAGE, mask=there, other=0.0)


@gluon.constexpr_function
def products_layout(warps: int) -> gl.NVMMADistributedLayout:
    """Return the layout of products [warps, keys or dimensions, heads]: its columns are heads."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def codes_layout(words: int) -> gl.SwizzledSharedLayout:
    """Return the layout of a tile in shared memory, [keys, words]."""
    return gl.SwizzledSharedLayout(4, 32 // words, words // 4, [1, 0])


@gluon.jit
def scaled_query(given, scale, W: gl.constexpr):
    """Return queries [HEADS, D] as the second operand, [W, D, HEADS], and the unit of their scores.

    given: float32. The unit is what a product with codes is multiplied by, with `scale` in it.
    """
    HEADS: gl.constexpr = given.shape[0]
    D: gl.constexpr = given.shape[1]
    SECOND: gl.constexpr = gl.DotOperandLayout(1, products_layout(W), 2)
    size = gl.max(gl.max(gl.abs(given), 1), 0)
    exponent = gl.maximum(size.to(gl.int32, bitcast=True) >> 23, 16)
    up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
    unit = ((exponent - 8) << 23).to(gl.float32, bitcast=True) * scale
    query = _placed((given * up).to(gl.float16), HEADS, D).permute([1, 0])
    query = gl.convert_layout(query, gl.SliceLayout(0, SECOND))
    return gl.expand_dims(query, 0) + gl.zeros([W, D, HEADS], gl.float16, SECOND), unit


@gluon.jit
def with_tile(
    keys,
    values,
    query,
    key_unit,
    value_unit,
    attended,
    top,
    mass,
    acc,
    SOFTCAP: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """Return the state of a row's softmax, (top, mass, acc), after another tile.

    keys, values: shared memory [tile, words]; query: from scaled_query; key_unit, value_unit,
    attended [W, tile / W]: what scores and values are multiplied by, and which keys count; top [W,
    HEADS]; mass [W, tile / W, HEADS]; acc [W, D, HEADS].
    """
    W: gl.constexpr = acc.shape[0]
    HEADS: gl.constexpr = acc.shape[2]
    TILE: gl.constexpr = keys.shape[0]
    WORDS: gl.constexpr = keys.shape[1]
    MMA: gl.constexpr = products_layout(W)
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    first = _first_keys(keys.load(_key_layout(TILE, WORDS, W)), FORMAT, W, FIRST)
    scores = mma_v2(first, query, gl.zeros([W, TILE // W, HEADS], gl.float32, MMA))
    scores *= gl.expand_dims(key_unit, 2)
    if SOFTCAP is not None:
        scores = bounded(scores, SOFTCAP)
    scores = gl.where(gl.expand_dims(attended, 2), scores, float("-inf"))
    raised = scores + gl.expand_dims(_log2_of(gl.maximum(value_unit, LEAST_SCALE)), 2)
    highest = gl.maximum(top, gl.max(raised, 1))
    fade = gl.exp2(top - highest)
    weights = gl.exp2(scores - gl.expand_dims(highest, 1))
    mass = mass * gl.expand_dims(fade, 1) + weights
    weights = (weights * gl.expand_dims(value_unit, 2)).to(gl.float16)
    first = _first_values(values.load(_value_layout(TILE, WORDS, W)), FORMAT, W, FIRST)
    acc = mma_v2(first, _second_weights(weights, SECOND), acc * gl.expand_dims(fade, 1))
    return highest, mass, acc


@gluon.jit
def sum_of_warps(top, mass, acc, layout: gl.constexpr):
    """Return the state of all warps together: top, mass [HEADS] and acc [HEADS, D]."""
    HEADS: gl.constexpr = acc.shape[2]
    D: gl.constexpr = acc.shape[1]
    highest = gl.max(top, 0)
    fade = gl.exp2(top - gl.expand_dims(highest, 0))
    total_mass = gl.sum(gl.sum(mass, 1) * fade, 0)
    both = gl.sum(acc * gl.expand_dims(fade, 1), 0)
    both = both.reshape(D // 16, 2, 8, HEADS).permute(3, 2, 0, 1).reshape(HEADS, D)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, layout)
    both = gl.convert_layout(both, layout)
    highest = gl.convert_layout(highest, BY_ROW)
    return highest, gl.convert_layout(total_mass, BY_ROW), both
