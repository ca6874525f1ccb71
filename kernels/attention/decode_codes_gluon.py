"""Decode attention over codes of 8 bits, one query token a row, on GPUs that have PDL.

The division of the rows among programs, and the sum of a row's parts, are those of the general
kernel (decode_attention_triton.py). These parts differ:

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

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestep.kernels.attention.scores_triton import LOG2_E, bounded
from sidestep.kernels.launch_order import reads_early

# Triton 3.9 has these by other names than 3.6.
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

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
def _ask(
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
def _scales(numbers, block, index, head, within, length, stride, KVH, PAGE, TILE):
    """Return the scales of a tile's keys and values, 0 behind the last token."""
    place = numbers + block.to(gl.int64) * stride + head * PAGE + index * TILE % PAGE + within
    there = index * TILE + within < length
    key_scale = gl.load(place, mask=there, other=0.0)
    return key_scale, gl.load(place + KVH * PAGE, mask=there, other=0.0)


@gluon.jit
def _combined(
    partial,
    stats,
    sinks,
    target,
    first_part,
    last_part,
    head,
    KVH: gl.constexpr,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    COMBINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add a row's parts, and store the result at `target`."""
    ACROSS: gl.constexpr = D // 4
    L: gl.constexpr = gl.BlockedLayout(
        [COMBINED, 1, 4], [1, 32 // ACROSS, ACROSS], [1, num_warps, 1], [2, 1, 0]
    )
    LT: gl.constexpr = gl.SliceLayout(2, L)
    LG: gl.constexpr = gl.SliceLayout(0, LT)
    LO: gl.constexpr = gl.SliceLayout(0, L)
    group = gl.arange(0, GROUP, layout=LG)
    rows = gl.arange(0, GROUP, layout=gl.SliceLayout(1, LO))[:, None]
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    each = gl.arange(0, COMBINED, layout=gl.SliceLayout(1, LT))
    wide = gl.arange(0, COMBINED, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    top = gl.full([GROUP], LOWEST, gl.float32, LG)
    mass = gl.zeros([GROUP], gl.float32, LG)
    acc = gl.zeros([GROUP, D], gl.float32, LO)
    for start in range(first_part, last_part + 1, COMBINED):
        # The last part is loaded several times, rather than with a mask, and counts once.
        part = gl.minimum(start + each, last_part)
        slot = (part * KVH + head) * 2 + (part == first_part).to(gl.int32)
        stat = stats + slot[:, None] * (2 * GROUP) + group[None, :]
        tops = gl.load(stat, cache_modifier=".cg")
        masses = gl.load(stat + GROUP, cache_modifier=".cg")
        wide_part = gl.minimum(start + wide, last_part)
        wide_slot = (wide_part * KVH + head) * 2 + (wide_part == first_part).to(gl.int32)
        source = partial + gl.expand_dims(wide_slot[:, None], 2) * (GROUP * D)
        source += gl.expand_dims(rows * D + dims, 0)
        values = gl.load(source, cache_modifier=".cg")
        tops = gl.where((start + each <= last_part)[:, None], tops, LOWEST)
        highest = gl.maximum(top, gl.max(tops, 0))
        share = gl.where(
            (start + each <= last_part)[:, None], gl.exp2(tops - highest[None, :]), 0.0
        )
        fade = gl.exp2(top - highest)
        mass = mass * fade + gl.sum(masses * share, 0)
        acc *= gl.convert_layout(fade, gl.SliceLayout(1, LO))[:, None]
        acc += gl.sum(values * gl.expand_dims(share, 2), 0)
        top = highest
    if sinks is not None:
        sink = gl.load(sinks + head * G + group, mask=group < G, other=0.0) * LOG2_E
        mass += gl.exp2(sink - top)
    mass = gl.where(mass > 0.0, mass, 1.0)
    result = acc / gl.convert_layout(mass, gl.SliceLayout(1, LO))[:, None]
    gl.store(
        target + rows * D + dims,
        result.to(target.dtype.element_ty),
        mask=(rows < G) & (dims < D),
    )


@reads_early("tile_ends", "slots", "seq_lens", "block_tables")
@gluon.jit(do_not_specialize=["num_parts", "min_tiles"])
def _decode_codes(
    q,
    codes,
    numbers,
    block_tables,
    slots,
    seq_lens,
    tile_ends,
    out,
    partial,
    stats,
    counters,
    sinks,
    q_stride,
    table_stride,
    block_stride,
    numbers_stride,
    out_stride,
    scale,
    num_parts,
    min_tiles,
    KVH: gl.constexpr,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ROWS: gl.constexpr,
    COMBINED: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
    FORMAT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    W: gl.constexpr = num_warps
    TW: gl.constexpr = TILE // W
    WORDS: gl.constexpr = D // 4
    # The columns of a warp's products are heads. The rows are keys, and then dimensions.
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SECOND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, MMA)
    BY_KEY: gl.constexpr = gl.SliceLayout(2, MMA)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // WORDS, WORDS // 4, [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    FEW: gl.constexpr = gl.BlockedLayout([8], [32], [W], [0])
    QL: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])
    AHEAD: gl.constexpr = STAGES - 1
    head = gl.program_id(0) % KVH
    part = gl.program_id(0) // KVH
    # 1. Find this program's share of the tiles, and the rows that they belong to. The plan and the
    #    tables, which @reads_early names, need no wait (see kernels/launch.py).
    ends = gl.load(tile_ends + gl.arange(0, ROWS, layout=LINE))
    total = gl.max(ends, 0)
    quota = gl.maximum(gl.cdiv(total, num_parts), min_tiles)
    tile = part * quota
    last = gl.minimum(tile + quota, total)
    # Idle programs return at once. The first one waits in any case, so that no later kernel
    # overtakes the one before.
    if (tile >= last) & (part > 0):
        return
    row = gl.sum((ends <= tile).to(gl.int32), 0)
    row_begin = gl.max(gl.where(ends <= tile, ends, 0), 0)
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], SWIZZLED)
    values = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], SWIZZLED)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, BY_KEY))
    own = gl.arange(0, TW, layout=gl.SliceLayout(0, BY_KEY))
    within = warp[:, None] * TW + own[None, :]
    waits = True
    gl.static_assert(PDL)
    if tile >= last:
        tl.extra.cuda.gdc_wait()
    while tile < last:
        slot = gl.load(slots + row)
        row_end = gl.load(tile_ends + row)
        length = gl.load(seq_lens + row)
        table = block_tables + slot.to(gl.int64) * table_stride
        # 2. Ask for the first codes. The kernel before writes those of the last token alone, so
        #    the last tile must wait for it.
        visible = 0
        if WINDOW:
            visible = gl.maximum(length - WINDOW, 0)
        shift = visible // TILE - row_begin
        stop = gl.minimum(row_end, last)
        begin, end = tile + shift, stop + shift
        ahead = gl.minimum(begin + gl.arange(0, 8, layout=FEW), end - 1)
        blocks = gl.load(table + ahead * TILE // PAGE)
        place = gl.arange(0, 8, layout=FEW)
        if waits & (end - begin == 1) & (stop == row_end):
            tl.extra.cuda.gdc_wait()
        key_scale, value_scale = _scales(
            numbers, gl.sum(gl.where(place == 0, blocks, 0), 0), begin, head, within, length,
            numbers_stride, KVH, PAGE, TILE,
        )  # fmt: skip
        for stage in gl.static_range(AHEAD):
            if waits & (begin + stage == end - 1) & (stop == row_end):
                tl.extra.cuda.gdc_wait()
            if begin + stage < end:
                _ask(
                    codes, keys.index(stage), values.index(stage),
                    gl.sum(gl.where(place == stage, blocks, 0), 0), begin + stage, head, length,
                    block_stride, KVH, WORDS, PAGE, TILE, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
        if waits:
            tl.extra.cuda.gdc_wait()
            if NEXT_EARLY:
                tl.extra.cuda.gdc_launch_dependents()
        waits = False
        next_block = gl.sum(gl.where(place == 1, blocks, 0), 0)
        ask_block = gl.sum(gl.where(place == AHEAD, blocks, 0), 0)
        # 3. Bring the queries into the range of float16.
        m = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QL))[:, None]
        d = gl.arange(0, D, layout=gl.SliceLayout(0, QL))[None, :]
        given = gl.load(
            q + row * q_stride + (head * G + m) * D + d, mask=(m < G) & (d < D), other=0.0
        ).to(gl.float32)
        size = gl.max(gl.max(gl.abs(given), 1), 0)
        exponent = gl.maximum(size.to(gl.int32, bitcast=True) >> 23, 16)
        up = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
        unit = ((exponent - 8) << 23).to(gl.float32, bitcast=True) * scale
        query = _placed((given * up).to(gl.float16), HEADS, D).permute([1, 0])
        query = gl.convert_layout(query, gl.SliceLayout(0, SECOND))
        query = gl.expand_dims(query, 0) + gl.zeros([W, D, HEADS], gl.float16, SECOND)
        # 4. Attend to the keys.
        top = gl.full([W, HEADS], LOWEST, gl.float32, BY_HEAD)
        mass = gl.zeros([W, TW, HEADS], gl.float32, MMA)
        acc = gl.zeros([W, D, HEADS], gl.float32, MMA)
        for index in range(begin, end):
            turn = (index - begin) % STAGES
            async_copy.wait_group(AHEAD - 1)
            _barrier()
            if index + AHEAD < end:
                free = (index - begin + AHEAD) % STAGES
                _ask(
                    codes, keys.index(free), values.index(free), ask_block, index + AHEAD, head,
                    length, block_stride, KVH, WORDS, PAGE, TILE, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
            ask_block = gl.load(table + gl.minimum(index + STAGES, end - 1) * TILE // PAGE)
            key_unit = key_scale.to(gl.float32) * unit
            value_unit = value_scale.to(gl.float32)
            key_scale, value_scale = _scales(
                numbers, next_block, index + 1, head, within, length, numbers_stride, KVH, PAGE,
                TILE,
            )  # fmt: skip
            next_block = gl.load(table + gl.minimum(index + 2, end - 1) * TILE // PAGE)
            words = keys.index(turn).load(_key_layout(TILE, WORDS, W))
            first = _first_keys(words, FORMAT, W, FIRST)
            scores = mma_v2(first, query, gl.zeros([W, TW, HEADS], gl.float32, MMA))
            scores *= gl.expand_dims(key_unit, 2)
            if SOFTCAP is not None:
                scores = bounded(scores, SOFTCAP)
            key = index * TILE + within
            attended = (key < length) & (key >= visible)
            scores = gl.where(gl.expand_dims(attended, 2), scores, float("-inf"))
            raised = scores + gl.expand_dims(_log2_of(gl.maximum(value_unit, LEAST_SCALE)), 2)
            highest = gl.maximum(top, gl.max(raised, 1))
            fade = gl.exp2(top - highest)
            weights = gl.exp2(scores - gl.expand_dims(highest, 1))
            mass = mass * gl.expand_dims(fade, 1) + weights
            weights = (weights * gl.expand_dims(value_unit, 2)).to(gl.float16)
            words = values.index(turn).load(_value_layout(TILE, WORDS, W))
            first = _first_values(words, FORMAT, W, FIRST)
            acc = mma_v2(first, _second_weights(weights, SECOND), acc * gl.expand_dims(fade, 1))
            top = highest
        if not NEXT_EARLY:
            # The next kernel's weights would take the memory's time from these keys and values.
            tl.extra.cuda.gdc_launch_dependents()
        # 5. Add the warps' parts.
        async_copy.wait_group(0)
        highest = gl.max(top, 0)
        fade = gl.exp2(top - gl.expand_dims(highest, 0))
        total_mass = gl.sum(gl.sum(mass, 1) * fade, 0)
        both = gl.sum(acc * gl.expand_dims(fade, 1), 0)
        both = both.reshape(D // 16, 2, 8, HEADS).permute(3, 2, 0, 1).reshape(HEADS, D)
        both = gl.convert_layout(both, QL)
        BY_ROW: gl.constexpr = gl.SliceLayout(1, QL)
        highest = gl.convert_layout(highest, BY_ROW)
        total_mass = gl.convert_layout(total_mass, BY_ROW)
        rows = gl.arange(0, HEADS, layout=BY_ROW)
        target = out + row * out_stride + head * (G * D)
        begins_here = tile == row_begin
        if begins_here & (stop == row_end):
            # 6. Store the result of a row that was here as a whole.
            if sinks is not None:
                sink = gl.load(sinks + head * G + rows, mask=rows < G, other=0.0) * LOG2_E
                total_mass += gl.exp2(sink - highest)
            total_mass = gl.where(total_mass > 0.0, total_mass, 1.0)
            gl.store(
                target + m * D + d,
                (both / total_mass[:, None]).to(out.dtype.element_ty),
                mask=(m < G) & (d < D),
            )
        else:
            # 7. Store the part, and combine the row if all other programs have stored theirs.
            place_of = (part * KVH + head) * 2 + begins_here.to(gl.int32)
            gl.store(partial + place_of * (GROUP * D) + m * D + d, both, mask=(m < GROUP) & (d < D))
            stat = stats + place_of * (2 * GROUP) + rows
            gl.store(stat, highest, mask=rows < GROUP)
            gl.store(stat + GROUP, total_mass, mask=rows < GROUP)
            first_part = row_begin // quota
            last_part = (row_end - 1) // quota
            _barrier()
            arrived = gl.atomic_add(counters + row * KVH + head, 1, sem="acq_rel")
            if arrived == last_part - first_part:
                gl.store(counters + row * KVH + head, 0)
                _combined(
                    partial, stats, sinks, target, first_part, last_part, head, KVH, G, GROUP, D,
                    COMBINED, num_warps,
                )  # fmt: skip
        _barrier()
        tile = stop
        row_begin = row_end
        row += 1
