"""Decode attention of few rows of one query each, where waiting for memory is all the time.

With few rows a program has few keys, and the chain of steps that wait for one another counts. So
this kernel differs from the general one (decode_attention_triton.py):

- A program has keys of one row alone. A list has all that it needs to ask for them, and its first
  keys and values are on their way to shared memory before it waits for the projections.
  Tokens of earlier steps are in the cache by then: no kernel directly before attention writes
  there. The new token never passes through the cache.
- All warps multiply the queries with keys of their own, exchange the scores once, and then each has
  all weights and accumulates dimensions of its own: two barriers for a tile, and no sum over warps.
- The last program of a row keeps its part, and takes the other parts as they arrive. Scratch memory
  holds a number that is no result, until a part replaces it. So there is no fence, no counter and
  no second trip. A program waits for programs of smaller numbers alone, which start before it: so
  it never waits for one that cannot start.

It is written in Gluon, Triton's lower level, because Triton can express neither these layouts nor
these copies.
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
ABSENT = gl.constexpr(-1)
KEY_ROW, VALUE_ROW = gl.constexpr(14), gl.constexpr(15)
"""Rows of the new key and value, beside those of queries."""


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
def _unsigned(bits):
    return bits.to(gl.uint32, bitcast=True)


@gluon.jit
def _bits(x):
    """Return the bits of float32, never those of ABSENT."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits == ABSENT, 0x7FC00000, bits)


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
    KVH: gl.constexpr,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    COMBINED: gl.constexpr,
    NORM: gl.constexpr,
    NEXT_EARLY: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    H: gl.constexpr = D // 2
    dtype: gl.constexpr = q.dtype.element_ty
    MS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    MX: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MS, 2)
    QL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [num_warps, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8 if H >= 64 else 4, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SCORES: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The layouts of parts: each thread has some dimensions of one head, of all parts.
    VEC: gl.constexpr = GROUP * D // (32 * num_warps) if 32 * num_warps < GROUP * D else 1
    ACROSS: gl.constexpr = D // VEC if D // VEC < 32 else 32
    WARPS: gl.constexpr = D // VEC // ACROSS if num_warps > D // VEC // ACROSS else num_warps
    L3: gl.constexpr = gl.BlockedLayout(
        [COMBINED, 1, VEC], [1, 32 // ACROSS, ACROSS], [1, num_warps // WARPS, WARPS], [2, 1, 0]
    )
    LO: gl.constexpr = gl.SliceLayout(0, L3)
    LT: gl.constexpr = gl.SliceLayout(2, L3)
    LG: gl.constexpr = gl.SliceLayout(0, LT)
    LR: gl.constexpr = gl.SliceLayout(1, LO)

    head = gl.program_id(0) % KVH
    part = gl.program_id(0) // KVH
    # 1. Ask for everything that the kernel before does not write (see kernels/launch.py).
    entry = work + part * 8
    row = gl.load(entry)
    slot = gl.load(entry + 1)
    length = gl.load(entry + 2)
    tile = gl.load(entry + 3)
    stop = gl.load(entry + 4)
    parts_of_row = gl.load(entry + 5)
    block = gl.load(entry + 6)
    next_block = gl.load(entry + 7)
    first_part, owner = parts_of_row // 2, parts_of_row % 2
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
    new_block = gl.load(table + stored // PAGE).to(gl.int64)
    h = gl.arange(0, H, layout=gl.SliceLayout(0, QL))
    c = gl.load(cos + stored * H + h)[None, :]
    s = gl.load(sin + stored * H + h)[None, :]
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, QL))
    is_key = (m == KEY_ROW)[:, None]
    if NORM:
        low_weight = gl.where(
            is_key,
            gl.load(k_weight + h).to(gl.float32)[None, :],
            gl.load(q_weight + h).to(gl.float32)[None, :],
        )
        high_weight = gl.where(
            is_key,
            gl.load(k_weight + H + h).to(gl.float32)[None, :],
            gl.load(q_weight + H + h).to(gl.float32)[None, :],
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
        if NEXT_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    if row < 0:
        return
    # 2. Norm and turn the row's queries and its new key, which lies behind the queries' heads.
    begin = q + row * q_stride
    heads = gl.where(m == KEY_ROW, KVH * G + head, head * G + m)
    heads = gl.where(m == VALUE_ROW, KVH * G + KVH + head, heads)
    source = begin + heads[:, None] * D + h[None, :]
    inside = ((m < G) | (m >= KEY_ROW))[:, None] & (h < H)[None, :]
    low = gl.load(source, mask=inside, other=0.0)
    high = gl.load(source + H, mask=inside, other=0.0)
    x, y = low.to(gl.float32), high.to(gl.float32)
    if NORM:
        norm = gl.rsqrt((gl.sum(x * x, 1) + gl.sum(y * y, 1)) / D + eps)[:, None]
        x = ((x * norm).to(dtype).to(gl.float32) * low_weight).to(dtype).to(gl.float32)
        y = ((y * norm).to(dtype).to(gl.float32) * high_weight).to(dtype).to(gl.float32)
    is_value = (m == VALUE_ROW)[:, None]
    low = gl.where(is_value, low, (x * c - y * s).to(dtype))
    high = gl.where(is_value, high, (y * c + x * s).to(dtype))
    low_rows = gl.allocate_shared_memory(dtype, [16, H], SWIZZLED, low)
    high_rows = gl.allocate_shared_memory(dtype, [16, H], SWIZZLED, high)
    _barrier()
    low_query, high_query = low_rows.load(A), high_rows.load(A)
    # The score of the new token is that of one row with another.
    AX: gl.constexpr = gl.DotOperandLayout(0, MX, 2)
    BX: gl.constexpr = gl.DotOperandLayout(1, MX, 2)
    pairs = mma_v2(
        low_rows.load(AX),
        low_rows.permute([1, 0]).load(BX),
        gl.zeros([16, 16], gl.float32, MX),
    )
    pairs = mma_v2(high_rows.load(AX), high_rows.permute([1, 0]).load(BX), pairs)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, MX))
    score = gl.sum(gl.where((column == KEY_ROW)[None, :], pairs, 0.0), 1) * scale
    if SOFTCAP is not None:
        score = bounded(score, SOFTCAP)
    score = gl.convert_layout(score, gl.SliceLayout(1, A))
    # It begins the softmax of the row's last part: each row has its value then.
    top = gl.where(owner == 1, score, LOWEST)
    mass = gl.where(owner == 1, score * 0.0 + 1.0, 0.0)
    source_row = gl.arange(0, 16, layout=gl.SliceLayout(0, A))[None, :]
    chosen = gl.where((source_row == VALUE_ROW) & (owner == 1), 1.0, 0.0)
    chosen = (chosen + gl.zeros([16, 16], gl.float32, A)).to(dtype)
    nothing = gl.zeros([16, H], gl.float32, MS)
    low_acc = mma_v2(chosen, low_rows.load(B), nothing)
    high_acc = mma_v2(chosen, high_rows.load(B), nothing)
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
    if PDL and not NEXT_EARLY:
        # The next kernel's weights would take the memory's time from these keys and values.
        tl.extra.cuda.gdc_launch_dependents()
    # 4. Give each thread some dimensions of one head.
    sums = gl.allocate_shared_memory(gl.float32, [16, D], PLAIN)
    sums.slice(0, H, dim=1).store(low_acc)
    sums.slice(H, H, dim=1).store(high_acc)
    tops = gl.allocate_shared_memory(gl.float32, [16], LINE, top)
    masses = gl.allocate_shared_memory(gl.float32, [16], LINE, mass)
    _barrier()
    acc = sums.slice(0, GROUP, dim=0).load(LO)
    top = tops.slice(0, GROUP, dim=0).load(LG)
    mass = masses.slice(0, GROUP, dim=0).load(LG)
    group = gl.arange(0, GROUP, layout=LG)
    rows = gl.arange(0, GROUP, layout=LR)[:, None]
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LO))[None, :]
    if owner == 1:
        # 5. Take the other parts, whose places are made ABSENT again. Loads have no masks, since
        # there are too few predicates for as many: the last part is loaded several times instead.
        parts = gl.arange(0, COMBINED, layout=gl.SliceLayout(1, LT))
        wide_parts = gl.arange(0, COMBINED, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))
        for start in range(first_part, part, COMBINED):
            places = gl.minimum(start + parts, part - 1) * KVH + head
            stat = stats + places[:, None] * (2 * GROUP) + group[None, :]
            places = gl.minimum(start + wide_parts, part - 1) * KVH + head
            place_of = partial + gl.expand_dims(gl.expand_dims(places, 1), 2) * (GROUP * D)
            place_of += gl.expand_dims(rows * D + dims, 0)
            missing = 1
            others = gl.zeros([COMBINED, GROUP, D], gl.int32, L3)
            other_tops = gl.zeros([COMBINED, GROUP], gl.int32, LT)
            other_masses = gl.zeros([COMBINED, GROUP], gl.int32, LT)
            while missing > 0:
                other_tops = gl.load(stat, volatile=True)
                other_masses = gl.load(stat + GROUP, volatile=True)
                others = gl.load(place_of, volatile=True)
                # As an unsigned number, ABSENT is the largest.
                of_stats = gl.maximum(_unsigned(other_tops), _unsigned(other_masses))
                of_stats = gl.convert_layout(gl.max(of_stats, 0), LR)[:, None]
                largest = gl.maximum(gl.max(_unsigned(others), 0), of_stats)
                largest = gl.max(gl.reshape(largest, [GROUP * D]), 0)
                missing = (largest == 0xFFFFFFFF).to(gl.int32)
            # Triton 3.6 fails if a loop's condition is of no use behind the loop: here it adds 0.
            absent = gl.full([COMBINED, GROUP], ABSENT, gl.int32, LT)
            gl.store(stat + missing, absent)
            gl.store(stat + GROUP, absent)
            gl.store(place_of, gl.full([COMBINED, GROUP, D], ABSENT, gl.int32, L3))
            there = (start + parts < part)[:, None]
            given = gl.where(there, other_tops.to(gl.float32, bitcast=True), LOWEST)
            highest = gl.maximum(top, gl.max(given, 0))
            share = gl.where(there, gl.exp2(given - highest[None, :]), 0.0)
            fade = gl.exp2(top - highest)
            mass = mass * fade
            mass += gl.sum(other_masses.to(gl.float32, bitcast=True) * share, 0)
            acc *= gl.convert_layout(fade, LR)[:, None]
            acc += gl.sum(others.to(gl.float32, bitcast=True) * gl.expand_dims(share, 2), 0)
            top = highest
        if sinks is not None:
            sink = gl.load(sinks + head * G + group, mask=group < G, other=0.0) * LOG2_E
            mass += gl.exp2(sink - top)
        result = acc / gl.convert_layout(mass, LR)[:, None]
        gl.store(
            out + row * out_stride + (head * G + rows) * D + dims,
            result.to(dtype),
            mask=(rows < G) & (dims < D),
        )
        # Store the new key and value.
        kept = (is_key | is_value) & (h < H)[None, :]
        kv_head = gl.where(m == VALUE_ROW, KVH + head, head)[:, None]
        target = cache + new_block * block_stride + kv_head * (PAGE * D)
        target += stored % PAGE * D + h[None, :]
        gl.store(target, low, mask=kept)
        gl.store(target + H, high, mask=kept)
    else:
        slot_of = part * KVH + head
        gl.store(partial + slot_of * (GROUP * D) + rows * D + dims, _bits(acc))
        gl.store(stats + slot_of * (2 * GROUP) + group, _bits(top))
        gl.store(stats + slot_of * (2 * GROUP) + GROUP + group, _bits(mass))
