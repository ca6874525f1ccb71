"""A program's part of decode attention of few rows, where keys and values are codes of 8 bits.

It does what `_attend` does in decode_few_gluon.py, with the tiles of common/codes_tile_gluon.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sidestep.kernels.attention.common.codes_tile_gluon import (
    ask_for_codes,
    codes_layout,
    products_layout,
    scaled_query,
    scales_of,
    sum_of_warps,
    with_tile,
)
from sidestep.kernels.attention.few_sums_gluon import (
    LOWEST,
    bits_of,
    part_entry,
    turned_queries,
    turns_of,
)

# Triton 3.9 has this by another name than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def attend_to_codes(
    q,
    codes,
    numbers,
    block_tables,
    work,
    partial,
    stats,
    cos,
    sin,
    q_weight,
    q_stride,
    table_stride,
    block_stride,
    numbers_stride,
    scale,
    eps,
    KVH: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    NORM: gl.constexpr,
    FORMAT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend to a part of a row's keys, and leave the result and its weight in scratch memory.

    codes: int32, words of four; block_stride counts them.
    """
    W: gl.constexpr = num_warps
    TW: gl.constexpr = TILE // W
    H: gl.constexpr = D // 2
    WORDS: gl.constexpr = D // 4
    HEADS: gl.constexpr = 8 if G <= 8 else 16
    MMA: gl.constexpr = products_layout(W)
    BY_KEY: gl.constexpr = gl.SliceLayout(2, MMA)
    FEW: gl.constexpr = gl.BlockedLayout([8], [32], [W], [0])
    HALF: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [W, 1], [1, 0])
    QL: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])
    head = gl.program_id(0) % KVH
    part = gl.program_id(0) // KVH
    # 1. Ask for everything that the kernel before does not write (see kernels/launch.py).
    row, slot, length, tile, stop, block, next_block = part_entry(work, part)
    # Idle programs return at once. The first one waits in any case, so that no later kernel
    # overtakes the one before.
    if (row < 0) & (part > 0):
        return
    stored = gl.maximum(length - 1, 0)
    table = block_tables + slot.to(gl.int64) * table_stride
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], codes_layout(WORDS))
    values = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], codes_layout(WORDS))
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, BY_KEY))
    own = gl.arange(0, TW, layout=gl.SliceLayout(0, BY_KEY))
    within = warp[:, None] * TW + own[None, :]
    last = gl.maximum(stop - 1, 0)
    blocks = block
    if STAGES > 2:
        place = gl.arange(0, 8, layout=FEW)
        blocks = gl.load(table + gl.minimum(tile + place, last) * TILE // PAGE)
    for stage in gl.static_range(STAGES):
        if tile + stage < stop:
            asked = next_block
            if stage == 0:
                asked = block
            elif stage > 1:
                asked = gl.sum(gl.where(place == stage, blocks, 0), 0)
            ask_for_codes(
                codes, keys.index(stage), values.index(stage), asked, tile + stage, head, stored,
                block_stride, KVH, WORDS, PAGE, TILE, W,
            )  # fmt: skip
        async_copy.commit_group()
    key_scale, value_scale = scales_of(
        numbers, block, tile, head, within, stored, numbers_stride, KVH, PAGE, TILE
    )
    # The block of the tile that is asked for next.
    ask_block = gl.load(table + gl.minimum(tile + STAGES, last) * TILE // PAGE)
    turns = turns_of(cos, sin, q_weight, stored, HALF, H, NORM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    # 2. Norm and rotate the row's queries.
    low, high = turned_queries(q + row * q_stride, head * G, turns, eps, HALF, HEADS, G, D, NORM)
    both = gl.join(low, high).permute(0, 2, 1).reshape(HEADS, D)
    query, unit = scaled_query(gl.convert_layout(both, QL).to(gl.float32), scale, W)
    # 3. Attend to the keys.
    visible = 0
    if WINDOW:
        visible = gl.maximum(length - WINDOW, 0)
    top = gl.full([W, HEADS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    mass = gl.zeros([W, TW, HEADS], gl.float32, MMA)
    acc = gl.zeros([W, D, HEADS], gl.float32, MMA)
    for index in range(tile, stop):
        turn = (index - tile) % STAGES
        async_copy.wait_group(STAGES - 1)
        _barrier()
        key_unit = key_scale.to(gl.float32) * unit
        value_unit = value_scale.to(gl.float32)
        key_scale, value_scale = scales_of(
            numbers, next_block, index + 1, head, within, stored, numbers_stride, KVH, PAGE, TILE
        )
        next_block = gl.load(table + gl.minimum(index + 2, last) * TILE // PAGE)
        key = index * TILE + within
        attended = (key < stored) & (key >= visible)
        top, mass, acc = with_tile(
            keys.index(turn), values.index(turn), query, key_unit, value_unit, attended,
            top, mass, acc, SOFTCAP, FORMAT,
        )  # fmt: skip
        if index + STAGES < stop:
            _barrier()
            ask_for_codes(
                codes, keys.index(turn), values.index(turn), ask_block, index + STAGES, head,
                stored, block_stride, KVH, WORDS, PAGE, TILE, W,
            )  # fmt: skip
            ask_block = gl.load(table + gl.minimum(index + STAGES + 1, last) * TILE // PAGE)
        async_copy.commit_group()
    # 4. Leave the part: its mean, and the logarithm of its weight.
    highest, total_mass, result = sum_of_warps(top, mass, acc, QL)
    rows = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QL))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, QL))[None, :]
    # A window may begin behind the part's last key. Such a part counts nothing.
    some = total_mass > 0.0
    total_mass = gl.where(some, total_mass, 1.0)
    target = partial + (part * KVH + head) * (G * D) + rows[:, None] * D + dims
    gl.store(target, bits_of(result / total_mass[:, None]), mask=(rows < G)[:, None] & (dims < D))
    stat = stats + (part * KVH + head) * G + rows
    weight = gl.where(some, highest + gl.log2(total_mass), LOWEST)
    gl.store(stat, bits_of(weight), mask=rows < G)
