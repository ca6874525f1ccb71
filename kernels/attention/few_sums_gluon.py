"""Sums of the parts of decode attention of few rows, by the last programs of its kernel."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sidestep.kernels.attention.scores_triton import LOG2_E, bounded

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
    KVH: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    COMBINED: gl.constexpr,
    NORM: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add up the parts of one query head of a row, and the new token, which no part has.

    Each warp has dimensions of its own, of all parts.
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
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # 1. Begin with the new token.
    given = q + row * q_stride + query_head * D + h
    low, high = gl.load(given), gl.load(given + H)
    given = q + row * q_stride + (KVH * G + head) * D + h
    low_key, high_key = gl.load(given), gl.load(given + H)
    low_value, high_value = gl.load(given + KVH * D), gl.load(given + KVH * D + H)
    low, high = turned(low, high, low_q_weight, high_q_weight, c, s, eps, D, NORM)
    low_key, high_key = turned(low_key, high_key, low_k_weight, high_k_weight, c, s, eps, D, NORM)
    if query_head % G == 0:
        target = cache + new_block * block_stride + head * (PAGE * D) + stored % PAGE * D + h
        gl.store(target, low_key)
        gl.store(target + H, high_key)
        gl.store(target + KVH * (PAGE * D), low_value)
        gl.store(target + KVH * (PAGE * D) + H, high_value)
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
