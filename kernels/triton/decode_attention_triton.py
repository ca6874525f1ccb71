"""Decode attention over the paged cache: one query token a row, rows of any length, in one launch.

All rows' keys are cut into tiles, and the tiles are dealt out evenly, row after row. Each program
of a head takes the same number of consecutive tiles, whichever rows they belong to (stream-K, Osama
et al. 2023; for attention, Sanovar et al. 2024). So the number of splits of a row follows from its
length and the batch, on the device. The grid is fixed, and no program has more to do than another.
A row that lies within one program is written directly. Parts of a split row go to scratch, and the
last program to arrive combines them (the softmax of parts: Dao et al. 2022).

With a `Rope` the launch takes the projections unchanged: each program normalises and rotates the
queries it needs. The program that has the end of a row begins with the row's new key and value and
writes them to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import num_processors, pdl
from sidestep.kernels.launch_order import reads_early


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and limits of decode attention, tuned by benchmarks/kernels/gpu_kernels.py."""

    tile: int = 32
    num_warps: int = 2
    num_stages: int = 3
    programs_per_processor: int = 4
    min_tiles: int = 2
    combined: int = 4096


def decode_config(head_dim: int, itemsize: int, num_heads: int) -> DecodeConfig:
    """Return the configuration for a head size, the cache's item size and the query heads."""
    if head_dim * itemsize > 512:
        return DecodeConfig(tile=32, num_warps=4, num_stages=2, programs_per_processor=2)
    if head_dim * itemsize > 256:
        return DecodeConfig(tile=32, num_warps=4, num_stages=3, programs_per_processor=2)
    # The wider the rest of a layer, the more a program may have to do before its start and end
    # count.
    return DecodeConfig(min_tiles=4 if num_heads * head_dim >= 4096 else 2)


class DecodeScratch:
    """Scratch memory of a launch; the counters are zero between launches."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        device: torch.device,
        config: DecodeConfig,
    ) -> None:
        self.config = config
        self.parts = max(1, num_processors(device) * config.programs_per_processor // num_kv_heads)
        group = triton.next_power_of_2(num_heads // num_kv_heads)
        # Each program has two parts: of the row it begins within, and of the row it ends within.
        slots = self.parts * num_kv_heads * 2
        self.partial = torch.empty(
            slots, group, max(16, triton.next_power_of_2(head_dim)), device=device
        )
        self.stats = torch.empty(slots, 2, group, device=device)
        self.counters = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Rope:
    """Operations between projections and attention: the norms of heads and the rotary embedding.

    cos, sin float32 [positions, D / 2]; norms: weights [D] of queries and keys, None where the
    model has none.
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float


@triton.jit
def _blocks_of(table, index, within, length, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the block id of a tile, or of each of its keys where a tile has several blocks."""
    if PAGE % TILE == 0:
        block = tl.load(table + index * TILE // PAGE)
    else:
        keys = index * TILE + within
        block = tl.load(table + keys // PAGE, mask=keys < length, other=0)
    return block.to(tl.int64)


@triton.jit
def _row_at(row, there, tile_ends, seq_lens, slots, block_tables, table_stride):
    """Return the end of a row's last tile, its length and table; any values if not `there`."""
    slot = tl.load(slots + row, mask=there, other=0)
    end = tl.load(tile_ends + row, mask=there, other=0)
    length = tl.load(seq_lens + row, mask=there, other=0)
    return end, length, block_tables + slot.to(tl.int64) * table_stride


@triton.jit
def _turned(
    source, weight, dims, position, cos, sin, eps, inside, D: tl.constexpr, NORM: tl.constexpr
):
    """Return the heads at `source` [N, 1], normalised and rotated: [N, DIM], 0 outside.

    They have the type of `source`. It rounds as kernels/triton/qkv_rope_triton.py does.
    """
    dtype = source.dtype.element_ty
    # Each dimension needs its partner, half a head away.
    other = tl.where(dims < D // 2, dims + D // 2, dims - D // 2)
    angle = tl.minimum(dims, other)
    there = dims < D
    c = tl.load(cos + position * (D // 2) + angle, mask=there, other=0.0)
    s = tl.load(sin + position * (D // 2) + angle, mask=there, other=0.0)
    s = tl.where(dims < D // 2, -s, s)
    x = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        w = tl.load(weight + dims, mask=there, other=0.0).to(tl.float32)
        v = tl.load(weight + other, mask=there, other=0.0).to(tl.float32)
        x = ((x * norm).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        y = ((y * norm).to(dtype).to(tl.float32) * v).to(dtype).to(tl.float32)
    return (x * c + y * s).to(dtype)


@triton.jit
def _begin_with_new(
    source,
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
    position,
    owner,
    KVH: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return the softmax's state after the token at `position` alone, if this program is the owner.

    The owner is the program that has the end of the row. It also writes the token's key and value
    to the cache. For other programs the state is that before any token. source: the token's key of
    this head; its value lies KVH heads further.
    """
    dims = tl.arange(0, DIM)[None, :]
    there = dims < D
    key = _turned(
        source + tl.zeros([1, 1], tl.int32), k_weight, dims, position, cos, sin, eps, there, D, NORM
    )
    value = tl.load(source + KVH * D + dims, mask=there, other=0.0)
    block = tl.load(table + position // PAGE).to(tl.int64)
    target = cache + block * block_stride + head * (PAGE * D) + (position % PAGE) * D + dims
    writes = dims < tl.where(owner, D, 0)
    tl.store(target, key, mask=writes)
    tl.store(target + KVH * (PAGE * D), value, mask=writes)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    top = tl.where(owner, score, float("-inf"))
    first = tl.arange(0, TILE)[None, :] == tl.where(owner, 0, -1)
    mass = tl.where(first, 1.0, tl.zeros([query.shape[0], TILE], tl.float32))
    acc = tl.where(owner, value.to(tl.float32), 0.0) + tl.zeros([query.shape[0], DIM], tl.float32)
    return top, mass, acc


@reads_early("tile_ends", "slots", "seq_lens")
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
    KVH: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COMBINED: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
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
    row_end, length, table = _row_at(
        row, tile < last, tile_ends, seq_lens, slots, block_tables, table_stride
    )
    # Idle programs return at once. The first one waits in any case, so that no later kernel
    # overtakes the one before.
    if (tile >= last) & (part > 0):
        return
    within = tl.arange(0, TILE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tile >= last:
        return
    m = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    group = tl.arange(0, GROUP)
    dtype = cache.dtype.element_ty
    while tile < last:
        # 2. Attend to one row, or to the part of it that lies in this share.
        stop = tl.minimum(row_end, last)
        visible = 0
        if WINDOW:
            visible = tl.maximum(length - WINDOW, 0)
        shift = visible // TILE - row_begin
        given = q + row * q_stride + (head * G + m)[:, None] * D
        inside_head = (m < G)[:, None] & (dims < D)[None, :]
        if ROPE:
            # The new token, whose key and value are not in the cache yet, begins the softmax of the
            # row's last part.
            stored = length - 1
            query = _turned(
                given, q_weight, dims[None, :], stored, cos, sin, eps, inside_head, D, NORM
            )
            top, mass, acc = _begin_with_new(
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
            )
        else:
            stored = length
            query = tl.load(given + dims[None, :], mask=inside_head, other=0.0)
            top = tl.full([M], float("-inf"), tl.float32)
            mass = tl.zeros([M, TILE], tl.float32)
            acc = tl.zeros([M, DIM], tl.float32)
        blocks = _blocks_of(table, tile + shift, within, length, PAGE, TILE)
        for index in range(tile + shift, stop + shift):
            keys = index * TILE + within
            # The next tile's blocks are loaded one iteration ahead, so that its keys can be loaded
            # without waiting.
            following = _blocks_of(
                table, tl.minimum(index + 1, stop + shift - 1), within, length, PAGE, TILE
            )
            place = blocks * block_stride + head * (PAGE * D) + (keys % PAGE) * D
            source = cache + place[:, None] + dims[None, :]
            # Keys behind the last token are not read: they may have any value, and 0 x NaN would
            # spread.
            readable = (keys < stored)[:, None] & (dims < D)[None, :]
            key = tl.load(source, mask=readable, other=0.0)
            value = tl.load(source + KVH * (PAGE * D), mask=readable, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            attended = (keys < stored) & (keys >= visible)
            scores = tl.where(attended[None, :], scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            fade = tl.exp2(top - highest)
            mass = mass * fade[:, None] + weights
            acc = tl.dot(weights.to(dtype), value, acc * fade[:, None], input_precision=PRECISION)
            top = highest
            blocks = following
        total_mass = tl.sum(mass, 1)
        target = out + row * out_stride + head * (G * D)
        begins_here = tile == row_begin
        if begins_here & (stop == row_end):
            # 3. Store the result of a row that was here as a whole.
            tl.store(
                target + m[:, None] * D + dims[None, :],
                (acc / total_mass[:, None]).to(out.dtype.element_ty),
                mask=(m < G)[:, None] & (dims < D)[None, :],
            )
        else:
            # 4. Store the part, and combine the row if all other programs have stored theirs.
            slot = (part * KVH + head) * 2 + begins_here.to(tl.int32)
            tl.store(
                partial + slot * (GROUP * DIM) + m[:, None] * DIM + dims[None, :],
                acc,
                mask=(m < G)[:, None],
            )
            tl.store(stats + slot * (2 * GROUP) + m, top, mask=m < G)
            tl.store(stats + slot * (2 * GROUP) + GROUP + m, total_mass, mask=m < G)
            first_part = row_begin // quota
            last_part = (row_end - 1) // quota
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + row * KVH + head, 1, sem="acq_rel")
            if arrived == last_part - first_part:
                tl.store(counters + row * KVH + head, 0)
                top_all = tl.full([GROUP], float("-inf"), tl.float32)
                mass_all = tl.zeros([GROUP], tl.float32)
                acc_all = tl.zeros([GROUP, DIM], tl.float32)
                for start in range(first_part, last_part + 1, COMBINED):
                    parts = start + tl.arange(0, COMBINED)
                    there = parts <= last_part
                    slots_of = (parts * KVH + head) * 2 + (parts == first_part).to(tl.int32)
                    stat = stats + slots_of[:, None] * (2 * GROUP) + group[None, :]
                    inside = there[:, None] & (group < G)[None, :]
                    tops = tl.load(stat, mask=inside, other=float("-inf"), cache_modifier=".cg")
                    masses = tl.load(stat + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
                    highest_all = tl.maximum(top_all, tl.max(tops, 0))
                    # Heads that are padding have no mass anywhere.
                    safe = tl.where(group < G, highest_all, 0.0)
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
                    acc_all = acc_all * fade_all[:, None] + tl.sum(values * share[:, :, None], 0)
                    top_all = highest_all
                mass_all = tl.where(group < G, mass_all, 1.0)
                tl.store(
                    target + group[:, None] * D + dims[None, :],
                    (acc_all / mass_all[:, None]).to(out.dtype.element_ty),
                    mask=(group < G)[:, None] & (dims < D)[None, :],
                )
        tile = stop
        row_begin = row_end
        row += 1
        row_end, length, table = _row_at(
            row, tile < last, tile_ends, seq_lens, slots, block_tables, table_stride
        )


def decode_attention(
    q: Tensor,
    cache: Tensor,
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
    rope: Rope | None = None,
) -> None:
    """Compute each decode row's attention over all its keys, or the last `window` of them (0: all).

    q [R.., >= H * D], rows contiguous within a head; cache [blocks, 2 KVH, block size, D];
    block_tables int32 [slots, W]; slots, seq_lens int32 [R]; tile_ends int32 from plan_attention
    with the scratch's tile; out [R.., H * D], written for decode rows only. With `rope`, q is [R..,
    (H + 2 KVH) * D], the projections, and each row's new key and value are written to the cache;
    without, they are there already.
    """
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads, config = twice_kv_heads // 2, scratch.config
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(group)
    combined = max(2, min(32, config.combined // (padded * triton.next_power_of_2(dim))))
    cos, sin, norms, eps = (
        (rope.cos, rope.sin, rope.norms, rope.eps) if rope is not None else (q, q, None, 0.0)
    )
    q_weight, k_weight = norms if norms is not None else (q, q)
    _decode[(scratch.parts * kv_heads,)](
        q,
        cache,
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
        scale * 1.4426950408889634,
        eps,
        kv_heads,
        group,
        padded,
        max(16, padded),
        dim,
        max(16, triton.next_power_of_2(dim)),
        page,
        config.tile,
        window,
        tile_ends.shape[0],
        scratch.parts,
        config.min_tiles,
        combined,
        rope is not None,
        norms is not None,
        "ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl(q),
    )
