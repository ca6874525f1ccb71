"""Decode attention of few rows of one query each, where waiting for memory is all the time.

With few rows a program has few keys, and the chain of steps that wait for one another counts. So
this kernel differs from the general one (decode_attention_triton.py):

- A program has keys of one row alone. A list has all that it needs to ask for them, and its first
  keys and values are on their way to shared memory before it waits for the projections.
  Tokens of earlier steps are in the cache by then: no kernel directly before attention writes
  there. The new token never passes through the cache.
- All warps multiply the queries with keys of their own, exchange the scores once, and then each has
  all weights and accumulates dimensions of its own: two barriers for a tile, and no sum over warps.
- More programs, one for each query head of each row, add the parts up. Each has the new token's key
  and value from the projections, and then takes all parts at once as they arrive. Scratch memory
  holds a number that is no result, until a part replaces it. So there is no fence, no counter and
  no second trip. A program waits for programs of smaller numbers alone, which start before it: so
  it never waits for one that cannot start.

Where keys and values are codes, they are attended to as they are stored
(few_codes_gluon.py), the new token too.

It is written in Gluon, Triton's lower level, because Triton can express neither these layouts nor
these copies.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestep.kernels.attention.common.scores_triton import bounded
from sidestep.kernels.attention.few_codes_gluon import attend_to_codes
from sidestep.kernels.attention.few_sums_gluon import (
    LOWEST,
    bits_of,
    combine,
    part_entry,
    turned_queries,
    turns_of,
)
from sidestep.kernels.launch_order import opens_early, reads_early

# Triton 3.9 has these by other names than 3.6.
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _ask_for_tile(
    cache,
    block,
    index,
    head,
    stored,
    low_keys,
    high_keys,
    low_values,
    high_values,
    block_stride,
    KVH: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Copy a tile's keys and values, each half of the dimensions by itself.

    Keys that are not stored become 0: they may have any value, and 0 x NaN would spread.
    """
    H: gl.constexpr = D // 2
    HALF: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [num_warps, 1], [1, 0])
    begin = cache + block.to(gl.int64) * block_stride + head * (PAGE * D)
    begin += index * TILE % PAGE * D
    key = gl.arange(0, TILE, layout=gl.SliceLayout(1, HALF))
    dims = gl.arange(0, H, layout=gl.SliceLayout(0, HALF))
    source = begin + key[:, None] * D + dims[None, :]
    there = (index * TILE + key < stored)[:, None] & (dims < H)[None, :]
    second = source + KVH * (PAGE * D)
    _load(low_keys, source, mask=there)
    _load(low_values, second, mask=there)
    _load(high_keys, source + H, mask=there)
    _load(high_values, second + H, mask=there)


@gluon.jit
def _attend(
    q,
    cache,
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
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend to a part of a row's keys, and leave the result and its weight in scratch memory."""
    H: gl.constexpr = D // 2
    dtype: gl.constexpr = q.dtype.element_ty
    MS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MS, 2)
    QL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [num_warps, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if H >= 64 else 4, [1, 0])
    SCORES: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])

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
    low_keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, H], SWIZZLED)
    low_values = gl.allocate_shared_memory(dtype, [STAGES, TILE, H], SWIZZLED)
    high_keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, H], SWIZZLED)
    high_values = gl.allocate_shared_memory(dtype, [STAGES, TILE, H], SWIZZLED)
    for stage in gl.static_range(STAGES):
        if tile + stage < stop:
            asked = next_block
            if stage == 0:
                asked = block
            elif stage > 1:
                asked = gl.load(table + (tile + stage) * TILE // PAGE)
            _ask_for_tile(
                cache,
                asked,
                tile + stage,
                head,
                stored,
                low_keys.index(stage),
                high_keys.index(stage),
                low_values.index(stage),
                high_values.index(stage),
                block_stride,
                KVH,
                D,
                PAGE,
                TILE,
                num_warps,
            )
        async_copy.commit_group()
    # The block of the tile that is asked for next.
    block = gl.load(table + gl.maximum(gl.minimum(tile + STAGES, stop - 1), 0) * TILE // PAGE)
    turns = turns_of(cos, sin, q_weight, stored, QL, H, NORM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    # 2. Norm and rotate the row's queries.
    low, high = turned_queries(q + row * q_stride, head * G, turns, eps, QL, 16, G, D, NORM)
    low_rows = gl.allocate_shared_memory(dtype, [16, H], SWIZZLED, low)
    high_rows = gl.allocate_shared_memory(dtype, [16, H], SWIZZLED, high)
    _barrier()
    low_query, high_query = low_rows.load(A), high_rows.load(A)
    top = gl.full([16], LOWEST, gl.float32, gl.SliceLayout(1, A))
    mass = gl.zeros([16], gl.float32, gl.SliceLayout(1, A))
    low_acc = gl.zeros([16, H], gl.float32, MS)
    high_acc = gl.zeros([16, H], gl.float32, MS)
    visible = 0
    if WINDOW:
        visible = gl.maximum(length - WINDOW, 0)
    # 3. Attend to the keys.
    weights_of = gl.allocate_shared_memory(gl.float32, [16, TILE], SCORES)
    within = gl.arange(0, TILE, layout=gl.SliceLayout(0, MS))
    for index in range(tile, stop):
        place = (index - tile) % STAGES
        async_copy.wait_group(STAGES - 1)
        _barrier()
        scores = mma_v2(
            low_query,
            low_keys.index(place).permute([1, 0]).load(B),
            gl.zeros([16, TILE], gl.float32, MS),
        )
        scores = mma_v2(high_query, high_keys.index(place).permute([1, 0]).load(B), scores)
        scores *= scale
        if SOFTCAP is not None:
            scores = bounded(scores, SOFTCAP)
        keys = index * TILE + within
        attended = (keys < stored) & (keys >= visible)
        weights_of.store(gl.where(attended[None, :], scores, LOWEST))
        _barrier()
        scores = weights_of.load(A)
        highest = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - highest[:, None])
        fade = gl.exp2(top - highest)
        mass = mass * fade + gl.sum(weights, 1)
        weights = weights.to(dtype)
        fades = gl.convert_layout(fade, gl.SliceLayout(1, MS))[:, None]
        low_acc = mma_v2(weights, low_values.index(place).load(B), low_acc * fades)
        high_acc = mma_v2(weights, high_values.index(place).load(B), high_acc * fades)
        top = highest
        if index + STAGES < stop:
            _barrier()
            _ask_for_tile(
                cache,
                block,
                index + STAGES,
                head,
                stored,
                low_keys.index(place),
                high_keys.index(place),
                low_values.index(place),
                high_values.index(place),
                block_stride,
                KVH,
                D,
                PAGE,
                TILE,
                num_warps,
            )
            block = gl.load(table + gl.minimum(index + STAGES + 1, stop - 1) * TILE // PAGE)
        async_copy.commit_group()
    # 4. Leave the part: its mean, and the logarithm of its weight.
    share = gl.convert_layout(1.0 / mass, gl.SliceLayout(1, MS))[:, None]
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, MS))[:, None]
    dims = gl.arange(0, H, layout=gl.SliceLayout(0, MS))[None, :]
    target = partial + (part * KVH + head) * (G * D) + rows * D + dims
    real = (rows < G) & (dims < H)
    gl.store(target, bits_of(low_acc * share), mask=real)
    gl.store(target + H, bits_of(high_acc * share), mask=real)
    heads = gl.arange(0, 16, layout=gl.SliceLayout(1, A))
    stat = stats + (part * KVH + head) * G + heads
    gl.store(stat, bits_of(top + gl.log2(mass)), mask=heads < G)


@opens_early
@reads_early("work", "block_tables")
@gluon.jit
def _decode_few(
    q,
    cache,
    block_tables,
    work,
    out,
    partial,
    stats,
    cos,
    sin,
    q_weight,
    k_weight,
    q_stride,
    table_stride,
    block_stride,
    out_stride,
    scale,
    eps,
    sinks,
    words,
    words_stride,
    numbers,
    numbers_stride,
    kv_scales,
    PARTS: gl.constexpr,
    KVH: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    COMBINED: gl.constexpr,
    NORM: gl.constexpr,
    FORMAT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    if gl.program_id(0) < PARTS * KVH:
        if FORMAT != "":
            attend_to_codes(
                q,
                words,
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
                words_stride,
                numbers_stride,
                scale,
                eps,
                KVH,
                G,
                D,
                PAGE,
                TILE,
                STAGES,
                WINDOW,
                SOFTCAP,
                NORM,
                FORMAT,
                PDL,
                num_warps,
            )
        else:
            _attend(
                q,
                cache,
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
                scale,
                eps,
                KVH,
                G,
                D,
                PAGE,
                TILE,
                STAGES,
                WINDOW,
                SOFTCAP,
                NORM,
                PDL,
                num_warps,
            )
    else:
        combine(
            gl.program_id(0) - PARTS * KVH,
            q,
            cache,
            block_tables,
            work + PARTS * 8,
            out,
            partial,
            stats,
            cos,
            sin,
            q_weight,
            k_weight,
            q_stride,
            table_stride,
            block_stride,
            out_stride,
            scale,
            eps,
            sinks,
            numbers,
            numbers_stride,
            kv_scales,
            KVH,
            G,
            D,
            PAGE,
            SOFTCAP,
            COMBINED,
            NORM,
            FORMAT,
            PDL,
            num_warps,
        )
