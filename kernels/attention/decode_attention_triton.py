"""Decode attention over the paged cache: few query tokens a row, rows of any length, in one launch.

All rows' keys are cut into tiles, and the tiles are dealt out evenly, row after row. Each program
of a head takes the same number of consecutive tiles, whichever rows they belong to (stream-K, Osama
et al. 2023; for attention, Sanovar et al. 2024). So the number of splits of a row follows from its
length and the batch, on the device. The grid is fixed, and no program has more to do than another.
A row that lies within one program is written directly. Parts of a split row go to scratch, and the
last program to arrive combines them (the softmax of parts: Dao et al. 2022).

With a `Rope` the launch takes the projections unchanged: each program normalises and rotates the
queries it needs. The program that has the end of a row begins with the row's new key and value and
writes them to the cache.

A row may have several query tokens, its last ones, as where drafts are verified. Their heads lie
beside one another in the rows of the products, so keys and values are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.attention.common.kv_codes_triton import (
    CodedCache,
    load_coded,
    parts_of,
    times_scales,
)
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.common.scores_triton import LOG2_E, bounded
from sidestep.kernels.attention.decode_codes import decode_codes, takes_codes
from sidestep.kernels.attention.decode_few import decode_few
from sidestep.kernels.attention.decode_rows_triton import blocks_of, place_of, row_at, sink_mass
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.hopper import decode_hopper
from sidestep.kernels.attention.qkv_rope_triton import begin_with_new, turned
from sidestep.kernels.launch import next_power_of_2, pdl
from sidestep.kernels.launch_order import reads_early

LOWEST = tl.constexpr(-3.0e38)
"""A number below all scores."""


@reads_early("tile_ends", "slots", "seq_lens", "valid_lens")
@triton.jit
def _decode(
    q,
    cache,
    block_tables,
    slots,
    seq_lens,
    tile_ends,
    out,
    partial,
    stats,
    counters,
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
    valid_lens,
    sinks,
    numbers,
    numbers_stride,
    KVH: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COMBINED: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    NEXT_EARLY: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) % KVH
    part = tl.program_id(0) // KVH
    # 1. Find this program's share of the tiles, and the rows that they belong to. The plan and the
    #    tables, which @reads_early names, need no wait (see kernels/launch.py).
    ends = tl.load(tile_ends + tl.arange(0, ROWS))
    total = tl.max(ends, 0)
    quota = tl.maximum(tl.cdiv(total, PARTS), MIN_TILES)
    tile = part * quota
    last = tl.minimum(tile + quota, total)
    row = tl.sum((ends <= tile).to(tl.int32), 0)
    row_begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
    row_end, length, valid, table = row_at(
        row, tile < last, tile_ends, seq_lens, valid_lens, slots, block_tables, table_stride
    )
    # Idle programs return at once. The first one waits in any case, so that no later kernel
    # overtakes the one before.
    if (tile >= last) & (part > 0):
        return
    within = tl.arange(0, TILE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if NEXT_EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    if tile >= last:
        return
    m = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    dtype: tl.constexpr = q.dtype.element_ty
    while tile < last:
        # 2. Attend to one row, or to the part of it that lies in this share.
        stop = tl.minimum(row_end, last)
        visible = 0
        position = length - Q + m // G
        if WINDOW:
            # These are the first query's, the others' first keys come behind.
            visible = tl.maximum(length - (Q - 1) - WINDOW, 0)
        shift = visible // TILE - row_begin
        if Q == 1:
            given = q + row * q_stride + (head * G + m)[:, None] * D
        else:
            given = q + row * Q * q_stride + head * (G * D)
            given += place_of(m, q_stride, G, D, Q)[:, None]
        inside_head = (m < G * Q)[:, None] & (dims < D)[None, :]
        if ROPE:
            # The new token, whose key and value are not in the cache yet, begins the softmax of the
            # row's last part.
            stored = length - 1
            query = turned(
                given, q_weight, dims[None, :], stored, cos, sin, eps, inside_head, D, NORM
            )
            top, mass, acc = begin_with_new(
                q + row * q_stride + (KVH * G + head) * D,
                query,
                k_weight,
                cos,
                sin,
                eps,
                scale,
                cache,
                table,
                block_stride,
                head,
                stored,
                stop == row_end,
                KVH,
                D,
                DIM,
                PAGE,
                TILE,
                NORM,
                SOFTCAP,
            )
        else:
            stored = valid
            query = tl.load(given + dims[None, :], mask=inside_head, other=0.0)
            # With several queries, one may see no key of a part. Its top is finite all the same,
            # since the difference of infinities is not a number.
            top = tl.full([M], float("-inf") if Q == 1 else LOWEST, tl.float32)
            mass = tl.zeros([M, TILE], tl.float32)
            acc = tl.zeros([M, DIM], tl.float32)
        first_index = tile + shift
        last_index = stop + shift - 1
        if valid_lens is not None:
            # Tables may have no entries for keys that are not valid.
            last_index = tl.minimum(last_index, (valid - 1) // TILE)
            first_index = tl.minimum(first_index, last_index)
        blocks = blocks_of(table, first_index, within, valid, PAGE, TILE)
        for index in range(tile + shift, stop + shift):
            keys = index * TILE + within
            # The next tile's blocks are loaded one iteration ahead, so that its keys can be loaded
            # without waiting.
            following = blocks_of(
                table, tl.minimum(index + 1, last_index), within, valid, PAGE, TILE
            )
            # Keys behind the last token are not read: they may have any value, and 0 x NaN would
            # spread.
            if FORMAT == "":
                place = blocks * block_stride + head * (PAGE * D) + (keys % PAGE) * D
                source = cache + place[:, None] + dims[None, :]
                readable = (keys < stored)[:, None] & (dims < D)[None, :]
                key = tl.load(source, mask=readable, other=0.0)
                value = tl.load(source + KVH * (PAGE * D), mask=readable, other=0.0)
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            else:
                key, key_scale, value, value_scale = load_coded(
                    cache,
                    numbers,
                    blocks,
                    keys,
                    head,
                    keys < stored,
                    block_stride,
                    numbers_stride,
                    KVH,
                    D,
                    DIM,
                    PAGE,
                    FORMAT,
                    dtype,
                )
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                scores *= (key_scale * scale)[None, :]
            if SOFTCAP is not None:
                scores = bounded(scores, SOFTCAP)
            if Q == 1:
                attended = ((keys < stored) & (keys >= visible))[None, :]
            else:
                attended = (keys < stored)[None, :] & (keys[None, :] <= position[:, None])
                if WINDOW:
                    attended &= keys[None, :] > position[:, None] - WINDOW
            scores = tl.where(attended, scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            fade = tl.exp2(top - highest)
            mass = mass * fade[:, None] + weights
            if FORMAT == "":
                weights = weights.to(dtype)
            else:
                weights, value = times_scales(weights, value, value_scale, dtype)
            acc = tl.dot(weights, value, acc * fade[:, None], input_precision=PRECISION)
            top = highest
            blocks = following
        if PDL and not NEXT_EARLY:
            # The next kernel's weights would take the memory's time from these keys and values.
            tl.extra.cuda.gdc_launch_dependents()
        total_mass = tl.sum(mass, 1)
        target = out + row * Q * out_stride + head * (G * D)
        begins_here = tile == row_begin
        if begins_here & (stop == row_end):
            # 3. Store the result of a row that was here as a whole.
            if sinks is not None:
                total_mass += sink_mass(sinks + head * G, m, top, G, Q)
            if Q > 1:
                # A query that is not valid may see no key at all.
                total_mass = tl.where(total_mass > 0.0, total_mass, 1.0)
            tl.store(
                target + place_of(m, out_stride, G, D, Q)[:, None] + dims[None, :],
                (acc / total_mass[:, None]).to(out.dtype.element_ty),
                mask=inside_head,
            )
        else:
            # 4. Store the part, and combine the row if all other programs have stored theirs.
            slot = (part * KVH + head) * 2 + begins_here.to(tl.int32)
            tl.store(
                partial + slot * (GROUP * DIM) + m[:, None] * DIM + dims[None, :],
                acc,
                mask=(m < G * Q)[:, None],
            )
            tl.store(stats + slot * (2 * GROUP) + m, top, mask=m < G * Q)
            tl.store(stats + slot * (2 * GROUP) + GROUP + m, total_mass, mask=m < G * Q)
            first_part = row_begin // quota
            last_part = (row_end - 1) // quota
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + row * KVH + head, 1, sem="acq_rel")
            if arrived == last_part - first_part:
                tl.store(counters + row * KVH + head, 0)
                for first in range(0, G * Q, CHUNK):
                    group = first + tl.arange(0, CHUNK)
                    top_all = tl.full([CHUNK], float("-inf"), tl.float32)
                    mass_all = tl.zeros([CHUNK], tl.float32)
                    acc_all = tl.zeros([CHUNK, DIM], tl.float32)
                    for start in range(first_part, last_part + 1, COMBINED):
                        parts = start + tl.arange(0, COMBINED)
                        there = parts <= last_part
                        slots_of = (parts * KVH + head) * 2 + (parts == first_part).to(tl.int32)
                        stat = stats + slots_of[:, None] * (2 * GROUP) + group[None, :]
                        inside = there[:, None] & (group < G * Q)[None, :]
                        tops = tl.load(stat, mask=inside, other=float("-inf"), cache_modifier=".cg")
                        masses = tl.load(stat + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
                        highest_all = tl.maximum(top_all, tl.max(tops, 0))
                        # Rows that are padding have no mass anywhere.
                        safe = tl.where(group < G * Q, highest_all, 0.0)
                        share = tl.exp2(tops - safe[None, :])
                        fade_all = tl.exp2(top_all - safe)
                        values = tl.load(
                            partial
                            + slots_of[:, None, None] * (GROUP * DIM)
                            + group[None, :, None] * DIM
                            + dims[None, None, :],
                            mask=inside[:, :, None],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        mass_all = mass_all * fade_all + tl.sum(masses * share, 0)
                        acc_all = acc_all * fade_all[:, None] + tl.sum(
                            values * share[:, :, None], 0
                        )
                        top_all = highest_all
                    if sinks is not None:
                        mass_all += sink_mass(sinks + head * G, group, top_all, G, Q)
                    if Q == 1:
                        mass_all = tl.where(group < G, mass_all, 1.0)
                    else:
                        mass_all = tl.where(mass_all > 0.0, mass_all, 1.0)
                    tl.store(
                        target + place_of(group, out_stride, G, D, Q)[:, None] + dims[None, :],
                        (acc_all / mass_all[:, None]).to(target.dtype.element_ty),
                        mask=(group < G * Q)[:, None] & (dims < D)[None, :],
                    )
        tile = stop
        row_begin = row_end
        row += 1
        row_end, length, valid, table = row_at(
            row,
            tile < last,
            tile_ends,
            seq_lens,
            valid_lens,
            slots,
            block_tables,
            table_stride,
        )


def _suits_hopper(cache: Tensor | CodedCache, q: Tensor, rope: Rope | None, num_heads: int) -> bool:
    """Return whether the kernel for Hopper takes such a cache and such queries or projections."""
    if not isinstance(cache, Tensor) or not decode_hopper.takes(cache, q.dtype):
        return False
    return rope is None or decode_hopper.turns(rope, q.dtype, num_heads, cache.shape[1] // 2)


def decode_attention(
    q: Tensor,
    cache: Tensor | CodedCache,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    tile_ends: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    *,
    num_heads: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rope: Rope | None = None,
    queries: int = 1,
    valid_lens: Tensor | None = None,
    few_work: Tensor | None = None,
    kv_scales: Tensor | None = None,
    keys_are_old: bool = False,
) -> None:
    """Compute each decode row's attention over all its keys, or the last `window` of them (0: all).

    Decode row r has `queries` consecutive tokens, those from r * queries on. They are the last ones
    of its seq_lens[r] tokens; each attends to the tokens up to itself, and `window` counts from
    there. valid_lens int32 [R]: the lengths up to the last valid token, of which each row has at
    least one; without it, all tokens are valid. Memory of the cache behind that length is not read.
    The results of other tokens are of no use, and their queries may have any value.

    q [R.., >= H * D], rows contiguous within a head; cache [blocks, 2 KVH, block size, D], or
    such a cache of codes; block_tables int32 [slots, W]; slots, seq_lens int32 [R]; tile_ends int32
    from plan_attention with the scratch's tile and the same `queries`; out [R.., H * D], written
    for decode rows only.
    softcap: the bound of the scores; sinks float32 [H]: scores that only the softmax's
    denominator has. With `rope`, which takes one query a row, q is [R.., (H + 2 KVH) * D], the
    projections, and each row's new key and value are written to the cache; without, they are there
    already. few_work, which goes with `rope`: the plan of scratch.few for these rows, whose kernel
    is then taken. It alone takes codes with a `rope`, and then kv_scales as of qkv_rope.
    keys_are_old: whether earlier steps wrote all keys of a row but its last one.
    """
    assert 1 <= queries <= scratch.queries
    assert rope is None or (queries == 1 and valid_lens is None), "rope takes one valid query a row"
    if few_work is not None:
        assert rope is not None and scratch.few is not None
        decode_few(
            q, cache, block_tables, few_work, out, scratch.few,
            num_heads=num_heads, window=window, scale=scale, softcap=softcap, sinks=sinks,
            rope=rope, kv_scales=kv_scales,
        )  # fmt: skip
        return
    assert rope is None or isinstance(cache, Tensor), "rope takes no codes"
    plain = softcap is None and valid_lens is None and queries == 1
    hopper, config = scratch.hopper if plain else None, scratch.config
    if hopper is not None and _suits_hopper(cache, q, rope, num_heads):
        assert isinstance(cache, Tensor)
        decode_hopper.decode_hopper(
            q, cache, block_tables, slots, seq_lens, tile_ends, out, hopper,
            num_heads=num_heads, window=window, scale=scale * LOG2_E.value, sinks=sinks,
            min_tiles=config.min_tiles, next_early=config.next_early, read_once=config.read_once,
            keys_are_old=keys_are_old, rope=rope,
        )  # fmt: skip
        return
    tiles = config.tile, config.num_warps, config.num_stages
    codes = cache if isinstance(cache, CodedCache) and queries == 1 else None
    if codes is not None and takes_codes(codes, q.dtype, num_heads, *tiles):
        decode_codes(
            q, codes, block_tables, slots, seq_lens, tile_ends, out, scratch.memory, scratch.config,
            num_heads=num_heads, window=window, scale=scale, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return
    _, twice_kv_heads, page, dim = cache.shape
    memory, numbers, numbers_stride, code_format = parts_of(cache)
    kv_heads = twice_kv_heads // 2
    group = num_heads // kv_heads
    padded, wide = next_power_of_2(group * queries), max(16, next_power_of_2(dim))
    warps, min_tiles, chunk, elements = config.num_warps, config.min_tiles, padded, config.combined
    if queries > 1:
        warps = config.num_warps_of(max(16, padded), wide)
        if code_format:  # which takes more registers
            warps = min(8, 2 * warps)
        min_tiles = config.min_tiles_of_several
        # A thread combines as many elements as with one query.
        elements = elements * warps // config.num_warps
        chunk = min(padded, elements // (2 * wide))
    combined = max(2, min(32, elements // (chunk * next_power_of_2(dim))))
    given = rope or Rope(q, q, None, 0.0)
    cos, sin, norms, eps = given.cos, given.sin, given.norms, given.eps
    q_weight, k_weight = norms if norms is not None else (q, q)
    _decode[(scratch.parts * kv_heads,)](
        q,
        memory,
        block_tables,
        slots,
        seq_lens,
        tile_ends,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        cos,
        sin,
        q_weight,
        k_weight,
        q.stride(0),
        block_tables.stride(0),
        cache.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        eps,
        valid_lens,
        sinks,
        numbers,
        numbers_stride,
        kv_heads,
        group,
        queries,
        padded,
        chunk,
        max(16, padded),
        dim,
        wide,
        page,
        config.tile,
        window,
        softcap,
        tile_ends.shape[0],
        scratch.parts,
        min_tiles,
        combined,
        rope is not None,
        norms is not None,
        "ieee",
        config.next_early,
        code_format,
        num_warps=warps,
        num_stages=config.num_stages,
        **pdl(q),
    )
