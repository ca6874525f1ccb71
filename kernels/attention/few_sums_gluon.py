"""Sums of the parts of decode attention of few rows, by the last programs of its kernel.

Before them stands what the programs that leave parts share.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sidestep.kernels.attention.common.kv_codes_triton import code_of, rounded_up
from sidestep.kernels.attention.common.scores_triton import LOG2_E, bounded

LOWEST = gl.constexpr(-3.0e38)
ABSENT = gl.constexpr(-1)
"""Scratch memory holds this where no part is."""


@gluon.jit
def _unsigned(bits):
    return bits.to(gl.uint32, bitcast=True)


@gluon.jit
def bits_of(x):
    """Return the bits of float32, never those of ABSENT."""
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits == ABSENT, 0x7FC00000, bits)


@gluon.jit
def turned(low, high, low_weight, high_weight, c, s, eps, D: gl.constexpr, NORM: gl.constexpr):
    """Norm and rotate the halves of heads, whose dimensions are the last axis."""
    dtype: gl.constexpr = low.dtype
    x, y = low.to(gl.float32), high.to(gl.float32)
    if NORM:
        last: gl.constexpr = len(low.shape) - 1
        norm = gl.rsqrt((gl.sum(x * x, last) + gl.sum(y * y, last)) / D + eps)
        if last == 1:
            norm = norm[:, None]
        x = ((x * norm).to(dtype).to(gl.float32) * low_weight).to(dtype).to(gl.float32)
        y = ((y * norm).to(dtype).to(gl.float32) * high_weight).to(dtype).to(gl.float32)
    return (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)


@gluon.jit
def part_entry(work, part):
    """Return row, slot, length, tile, stop, block and next block of a part (few_plan_triton.py)."""
    entry = work + part * 8
    row = gl.load(entry)
    slot = gl.load(entry + 1)
    length = gl.load(entry + 2)
    tile = gl.load(entry + 3)
    stop = gl.load(entry + 4)
    return row, slot, length, tile, stop, gl.load(entry + 6), gl.load(entry + 7)


@gluon.jit
def turns_of(cos, sin, q_weight, stored, layout: gl.constexpr, H: gl.constexpr, NORM: gl.constexpr):
    """Return what turned_queries needs of memory that no kernel writes: [1, H] each."""
    h = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    c = gl.load(cos + stored * H + h)[None, :]
    s = gl.load(sin + stored * H + h)[None, :]
    low_weight, high_weight = c, c
    if NORM:
        low_weight = gl.load(q_weight + h).to(gl.float32)[None, :]
        high_weight = gl.load(q_weight + H + h).to(gl.float32)[None, :]
    return low_weight, high_weight, c, s


@gluon.jit
def turned_queries(
    queries,
    first,
    turns,
    eps,
    layout: gl.constexpr,
    ROWS: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    NORM: gl.constexpr,
):
    """Return both halves [ROWS, D / 2] of a row's G query heads from `first` on, 0 behind them."""
    H: gl.constexpr = D // 2
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    h = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    source = queries + (first + m)[:, None] * D + h[None, :]
    inside = (m < G)[:, None] & (h < H)[None, :]
    low = gl.load(source, mask=inside, other=0.0)
    high = gl.load(source + H, mask=inside, other=0.0)
    return turned(low, high, turns[0], turns[1], turns[2], turns[3], eps, D, NORM)


@gluon.jit
def _coded(low, high, given, kv_head, FORMAT: gl.constexpr):
    """Return the halves of a head as codes, and its scale.

    given: float16 [2 KVH], scales that replace those of the heads where they are not 0, or None.
    """
    LARGEST: gl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    low, high = low.to(gl.float32), high.to(gl.float32)
    half = rounded_up(gl.max(gl.maximum(gl.abs(low), gl.abs(high)), 0) / LARGEST)
    if given is not None:
        own = gl.load(given + kv_head)
        half = gl.where(own > 0.0, own, half)
    scale = half.to(gl.float32)
    return code_of(low, scale, FORMAT), code_of(high, scale, FORMAT), half


@gluon.jit
def _decoded(code, half, FORMAT: gl.constexpr):
    """Return the numbers that codes and their scale stand for."""
    if FORMAT == "fp8":
        code = code.to(gl.float8e4nv, bitcast=True)
    return code.to(gl.float32) * half.to(gl.float32)


@gluon.jit
def combine(
    index,
    q,
    cache,
    block_tables,
    rows,
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
    KVH: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    COMBINED: gl.constexpr,
    NORM: gl.constexpr,
    FORMAT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add up the parts of one query head of a row, and the new token, which no part has.

    Each warp has dimensions of its own, of all parts. In a cache of codes (FORMAT), the new token
    is attended to as it is stored.
    """
    H: gl.constexpr = D // 2
    ACROSS: gl.constexpr = H // (4 * num_warps)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [1, num_warps], [1, 0])
    query_head = index % (KVH * G)
    head = query_head // G
    entry = rows + index // (KVH * G) * 8
    row = gl.load(entry)
    slot = gl.load(entry + 1)
    length = gl.load(entry + 2)
    first_part = gl.load(entry + 3)
    end_part = gl.load(entry + 4)
    if row < 0:
        return
    stored = length - 1
    table = block_tables + slot.to(gl.int64) * table_stride
    new_block = gl.load(table + stored // PAGE).to(gl.int64)
    h = gl.arange(0, H, layout=gl.SliceLayout(0, L))
    c = gl.load(cos + stored * H + h)
    s = gl.load(sin + stored * H + h)
    low_q_weight, high_q_weight, low_k_weight, high_k_weight = c, c, c, c
    if NORM:
        low_q_weight = gl.load(q_weight + h).to(gl.float32)
        high_q_weight = gl.load(q_weight + H + h).to(gl.float32)
        low_k_weight = gl.load(k_weight + h).to(gl.float32)
        high_k_weight = gl.load(k_weight + H + h).to(gl.float32)
    if sinks is not None:
        sink = gl.load(sinks + query_head) * LOG2_E
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 1. Begin with the new token.
    given = q + row * q_stride + query_head * D + h
    low, high = gl.load(given), gl.load(given + H)
    given = q + row * q_stride + (KVH * G + head) * D + h
    low_key, high_key = gl.load(given), gl.load(given + H)
    low_value, high_value = gl.load(given + KVH * D), gl.load(given + KVH * D + H)
    low, high = turned(low, high, low_q_weight, high_q_weight, c, s, eps, D, NORM)
    low_key, high_key = turned(low_key, high_key, low_k_weight, high_k_weight, c, s, eps, D, NORM)
    low_stored, high_stored = low_key, high_key
    low_stored_value, high_stored_value = low_value, high_value
    if FORMAT != "":
        low_stored, high_stored, key_scale = _coded(low_key, high_key, kv_scales, head, FORMAT)
        low_key = _decoded(low_stored, key_scale, FORMAT)
        high_key = _decoded(high_stored, key_scale, FORMAT)
        low_stored_value, high_stored_value, value_scale = _coded(
            low_value, high_value, kv_scales, KVH + head, FORMAT
        )
        low_value = _decoded(low_stored_value, value_scale, FORMAT)
        high_value = _decoded(high_stored_value, value_scale, FORMAT)
    if query_head % G == 0:
        target = cache + new_block * block_stride + head * (PAGE * D) + stored % PAGE * D + h
        gl.store(target, low_stored)
        gl.store(target + H, high_stored)
        gl.store(target + KVH * (PAGE * D), low_stored_value)
        gl.store(target + KVH * (PAGE * D) + H, high_stored_value)
        if FORMAT != "":
            place = numbers + new_block * numbers_stride + head * PAGE + stored % PAGE
            gl.store(place, key_scale)
            gl.store(place + KVH * PAGE, value_scale)
    top = gl.sum(
        low.to(gl.float32) * low_key.to(gl.float32) + high.to(gl.float32) * high_key.to(gl.float32),
        0,
    )
    top *= scale
    if SOFTCAP is not None:
        top = bounded(top, SOFTCAP)
    mass = top * 0.0 + 1.0
    low_acc, high_acc = low_value.to(gl.float32), high_value.to(gl.float32)
    # 2. Take the parts, whose places are made ABSENT again. Loads have no masks, since there are
    # too few predicates for as many: places behind the row's parts are read, and not regarded.
    parts = gl.arange(0, COMBINED, layout=gl.SliceLayout(1, L))
    for start in range(first_part, end_part, COMBINED):
        there = start + parts < end_part
        places = (start + parts) * KVH + head
        stat = stats + places * G + query_head % G
        low_places = partial + (places * G + query_head % G)[:, None] * D + h[None, :]
        missing = 1
        tops = gl.zeros([COMBINED], gl.int32, gl.SliceLayout(1, L))
        lows = gl.zeros([COMBINED, H], gl.int32, L)
        highs = gl.zeros([COMBINED, H], gl.int32, L)
        while missing > 0:
            tops = gl.load(stat, volatile=True)
            lows = gl.load(low_places, volatile=True)
            highs = gl.load(low_places + H, volatile=True)
            # As an unsigned number, ABSENT is the largest. Each warp loads all tops for itself, and
            # one may miss what another sees. So they are compared before the maximum over all
            # warps, after which all go on or none does.
            largest = gl.maximum(_unsigned(lows), _unsigned(highs))
            largest = gl.max(gl.maximum(largest, _unsigned(tops)[:, None]), 1)
            largest = gl.where(there, largest, 0)
            missing = (gl.max(largest, 0) == 0xFFFFFFFF).to(gl.int32)
        # Triton 3.6 fails if a loop's condition is of no use behind the loop: here it adds 0.
        gl.store(stat + missing, gl.full([COMBINED], ABSENT, gl.int32, parts.type.layout), there)
        real = there[:, None] & (h < H)[None, :]
        absent = gl.full([COMBINED, H], ABSENT, gl.int32, L)
        gl.store(low_places, absent, real)
        gl.store(low_places + H, absent, real)
        of_parts = gl.where(there, tops.to(gl.float32, bitcast=True), LOWEST)
        highest = gl.maximum(top, gl.max(of_parts, 0))
        share = gl.where(there, gl.exp2(of_parts - highest), 0.0)
        fade = gl.exp2(top - highest)
        mass = mass * fade + gl.sum(share, 0)
        # Places behind the row's parts may hold bits that are not a number.
        low_parts = gl.where(real, lows.to(gl.float32, bitcast=True), 0.0)
        high_parts = gl.where(real, highs.to(gl.float32, bitcast=True), 0.0)
        low_acc = low_acc * fade + gl.sum(low_parts * share[:, None], 0)
        high_acc = high_acc * fade + gl.sum(high_parts * share[:, None], 0)
        top = highest
    if sinks is not None:
        mass += gl.exp2(sink - top)
    target = out + row * out_stride + query_head * D + h
    gl.store(target, (low_acc / mass).to(out.dtype.element_ty))
    gl.store(target + H, (high_acc / mass).to(out.dtype.element_ty))
