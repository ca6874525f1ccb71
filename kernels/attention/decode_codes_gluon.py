"""Decode attention over codes of 8 bits, one query token a row, on GPUs that have PDL.

The division of the rows among programs, and the sum of a row's parts, are those of the general
kernel (decode_attention_triton.py). A program attends to a tile in a way of its own
(common/codes_tile_gluon.py).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sidestep.kernels.attention.common.codes_tile_gluon import (
    LOWEST,
    ask_for_codes,
    codes_layout,
    products_layout,
    scaled_query,
    scales_of,
    sum_of_warps,
    with_tile,
)
from sidestep.kernels.attention.common.scores_triton import LOG2_E
from sidestep.kernels.launch_order import reads_early

# Triton 3.9 has this by another name than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


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
    MMA: gl.constexpr = products_layout(W)
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, MMA)
    BY_KEY: gl.constexpr = gl.SliceLayout(2, MMA)
    SWIZZLED: gl.constexpr = codes_layout(WORDS)
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
        key_scale, value_scale = scales_of(
            numbers, gl.sum(gl.where(place == 0, blocks, 0), 0), begin, head, within, length,
            numbers_stride, KVH, PAGE, TILE,
        )  # fmt: skip
        for stage in gl.static_range(AHEAD):
            if waits & (begin + stage == end - 1) & (stop == row_end):
                tl.extra.cuda.gdc_wait()
            if begin + stage < end:
                ask_for_codes(
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
        query, unit = scaled_query(given, scale, W)
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
                ask_for_codes(
                    codes, keys.index(free), values.index(free), ask_block, index + AHEAD, head,
                    length, block_stride, KVH, WORDS, PAGE, TILE, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
            ask_block = gl.load(table + gl.minimum(index + STAGES, end - 1) * TILE // PAGE)
            key_unit = key_scale.to(gl.float32) * unit
            value_unit = value_scale.to(gl.float32)
            key_scale, value_scale = scales_of(
                numbers, next_block, index + 1, head, within, length, numbers_stride, KVH, PAGE,
                TILE,
            )  # fmt: skip
            next_block = gl.load(table + gl.minimum(index + 2, end - 1) * TILE // PAGE)
            key = index * TILE + within
            attended = (key < length) & (key >= visible)
            top, mass, acc = with_tile(
                keys.index(turn), values.index(turn), query, key_unit, value_unit, attended,
                top, mass, acc, SOFTCAP, FORMAT,
            )  # fmt: skip
        if not NEXT_EARLY:
            # The next kernel's weights would take the memory's time from these keys and values.
            tl.extra.cuda.gdc_launch_dependents()
        # 5. Add the warps' parts.
        async_copy.wait_group(0)
        highest, total_mass, both = sum_of_warps(top, mass, acc, QL)
        rows = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QL))
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
