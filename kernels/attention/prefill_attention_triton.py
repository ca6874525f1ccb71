"""Attention of prompt chunks over the paged cache, with tensor-core tiles.

The algorithm is FlashAttention (Dao et al. 2022). A program takes a tile of query rows of one KV
head: several tokens, and for each the query heads that share the head, so that keys and values are
read once for all of them. One loop goes through the tiles of keys whose keys are all in the cache,
so that the next tile is always on its way. Only tiles on the diagonal, and at the edge of a window,
are masked there. A second loop takes the last keys of a row that fill no tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestep.kernels.attention.common.kv_codes_triton import (
    CodedCache,
    load_coded,
    parts_of,
    times_scales,
)
from sidestep.kernels.attention.common.scores_triton import LOG2_E, bounded
from sidestep.kernels.attention.hopper import prefill_hopper
from sidestep.kernels.launch import cdiv, has_pdl, next_power_of_2, pdl
from sidestep.kernels.launch_order import reads_early


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes of prefill attention: rows and keys of a tile.

    benchmarks/kernels/gpu_kernels.py tunes them.
    """

    rows: int = 64
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    bulk: bool = True
    registers: int | None = None
    hopper: bool = False
    """Whether the kernel for Hopper takes it (hopper/prefill_hopper.py)."""

    def tokens(self, group: int) -> int:
        """Return the number of query tokens of a tile. group: number of query heads a KV head."""
        return max(1, self.rows // group)


HOPPER = PrefillConfig(prefill_hopper.ROWS, prefill_hopper.KEYS, hopper=True)


def prefill_config(head_dim: int, itemsize: int, *, hopper: bool = False) -> PrefillConfig:
    """Return the configuration for a head size and the cache's item size.

    hopper: whether the kernel for Hopper takes all of a model's layers.
    """
    if hopper:
        return HOPPER
    if head_dim > 256:
        return PrefillConfig(16, 16, 4, 2) if itemsize > 2 else PrefillConfig(32, 32, 8, 2)
    if itemsize > 2:
        return PrefillConfig(32, 32, 4, 2)
    if head_dim > 128:
        return PrefillConfig(64, 32, 4, 2)
    return PrefillConfig()


@triton.jit
def _blocks_of(table, start, within, length, PAGE: tl.constexpr, N: tl.constexpr):
    """Return the block id of a tile of keys, or of each key where a tile has several blocks."""
    if PAGE % N == 0:
        block = tl.load(table + start // PAGE)
    else:
        block = tl.load(table + (start + within) // PAGE, mask=start + within < length, other=0)
    return block


@triton.jit
def _attend(
    query,
    acc,
    top,
    mass,
    cache,
    rows_of_cache,
    table,
    positions,
    begin,
    end,
    edge,
    seen_by_all,
    length,
    head,
    block_stride,
    scale,
    numbers,
    numbers_stride,
    KVH: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WHOLE: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Attend to the keys from begin, a multiple of N, to end; return the softmax's new state.

    All rows see the keys from edge to seen_by_all. WHOLE: all of a tile's keys are in the cache.
    """
    dims = tl.arange(0, DIM)
    within = tl.arange(0, N)
    blocks = _blocks_of(table, tl.minimum(begin, (length - 1) // N * N), within, length, PAGE, N)
    for start in range(begin, end, N):
        keys = start + within
        # The next tile's blocks are loaded one iteration ahead, so that its keys can be loaded
        # without waiting.
        following = _blocks_of(
            table, tl.minimum(start + N, (end - 1) // N * N), within, length, PAGE, N
        )
        if FORMAT != "":
            key, key_scale, value, value_scale = load_coded(
                cache,
                numbers,
                blocks,
                keys,
                head,
                keys < length,
                block_stride,
                numbers_stride,
                KVH,
                D,
                DIM,
                PAGE,
                FORMAT,
                query.dtype,
            )
        elif BULK and WHOLE:
            row = blocks * (block_stride // D) + head * PAGE + start % PAGE
            key = rows_of_cache.load([row, 0])
            value = rows_of_cache.load([row + KVH * PAGE, 0])
        else:
            place = blocks.to(tl.int64) * block_stride + head * (PAGE * D) + (keys % PAGE) * D
            source = cache + place[:, None] + dims[None, :]
            if not WHOLE:
                readable = (keys < length)[:, None] & (dims < D)[None, :]
                key = tl.load(source, mask=readable, other=0.0)
                value = tl.load(source + KVH * (PAGE * D), mask=readable, other=0.0)
            elif D == DIM:
                key = tl.load(source)
                value = tl.load(source + KVH * (PAGE * D))
            else:
                key = tl.load(source, mask=(dims < D)[None, :], other=0.0)
                value = tl.load(source + KVH * (PAGE * D), mask=(dims < D)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if FORMAT != "":
            scores *= key_scale[None, :]
        unit = scale
        if SOFTCAP is not None:
            scores = bounded(scores * scale, SOFTCAP)
            unit = 1.0
        if (start < edge) | (start >= seen_by_all):
            attended = keys[None, :] <= positions[:, None]
            if WINDOW:
                attended &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(attended, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1) * unit)
        base = highest
        if WINDOW:  # a row may have seen nothing yet
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * unit - base[:, None])
        fade = tl.exp2(top - base)
        mass = mass * fade + tl.sum(weights, 1)
        if FORMAT == "":
            weights = weights.to(value.dtype)
        else:
            weights, value = times_scales(weights, value, value_scale, query.dtype)
        acc = tl.dot(weights, value, acc * fade[:, None], input_precision=PRECISION)
        top = highest
        blocks = following
    return acc, top, mass


@reads_early("tile_ends")
@triton.jit
def _prefill(
    q,
    cache,
    rows_of_cache,
    block_tables,
    slots,
    seq_lens,
    query_starts,
    tile_ends,
    out,
    q_stride,
    table_stride,
    block_stride,
    out_stride,
    scale,
    sinks,
    numbers,
    numbers_stride,
    KVH: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. Find this program's tile. The last tiles, which see most keys, come first. The table that
    #    @reads_early names needs no wait (see kernels/launch.py).
    ends = tl.load(tile_ends + tl.arange(0, ROWS))
    index = tl.max(ends, 0) - 1 - tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if index < 0:
        return
    head = tl.program_id(0)
    row = tl.sum((ends <= index).to(tl.int32), 0)
    begin = 0
    if row > 0:
        begin = tl.load(tile_ends + row - 1)
    length = tl.load(seq_lens + row)
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    # 2. Load its queries: row m is head m % G of token m // G.
    first = (index - begin) * TOKENS
    m = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    token = first + m // G
    valid = (m < TOKENS * G) & (token < count)
    offsets = (head * G + m % G)[:, None] * D + dims[None, :]
    inside = valid[:, None] & (dims < D)[None, :]
    rows = (query_start + token).to(tl.int64)
    query = tl.load(q + rows[:, None] * q_stride + offsets, mask=inside, other=0.0)
    context = length - count
    positions = context + token
    acc = tl.zeros([M, DIM], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    if sinks is not None:  # the softmax begins with them
        top = tl.load(sinks + head * G + m % G) * LOG2_E
        mass += 1.0
    # 3. Attend to the tiles of keys that are there as a whole, and to the row's last keys if they
    #    are none. The tiles on the diagonal and at the edge of a window have masks.
    end = context + tl.minimum(first + TOKENS, count)
    whole = tl.minimum(tl.cdiv(end, N), length // N) * N
    seen_by_all = (context + first + 1) // N * N
    start, edge = 0, 0
    if WINDOW:
        start = tl.maximum(context + first - WINDOW + 1, 0) // N * N
        edge = tl.maximum(end - WINDOW, 0)
        whole = tl.maximum(whole, start)
    acc, top, mass = _attend(
        query,
        acc,
        top,
        mass,
        cache,
        rows_of_cache,
        table,
        positions,
        start,
        whole,
        edge,
        seen_by_all,
        length,
        head,
        block_stride,
        scale,
        numbers,
        numbers_stride,
        KVH,
        D,
        DIM,
        PAGE,
        N,
        WINDOW,
        SOFTCAP,
        True,
        BULK,
        PRECISION,
        FORMAT,
    )
    acc, top, mass = _attend(
        query,
        acc,
        top,
        mass,
        cache,
        rows_of_cache,
        table,
        positions,
        whole,
        end,
        edge,
        seen_by_all,
        length,
        head,
        block_stride,
        scale,
        numbers,
        numbers_stride,
        KVH,
        D,
        DIM,
        PAGE,
        N,
        WINDOW,
        SOFTCAP,
        False,
        BULK,
        PRECISION,
        FORMAT,
    )
    # Rows of padding have no mass.
    result = acc * (1.0 / tl.where(valid, mass, 1.0))[:, None]
    tl.store(
        out + rows[:, None] * out_stride + offsets, result.to(out.dtype.element_ty), mask=inside
    )


def prefill_attention(
    q: Tensor,
    cache: Tensor | CodedCache,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    tile_ends: Tensor,
    out: Tensor,
    config: PrefillConfig,
    *,
    num_heads: int,
    max_tokens: int,
    max_rows: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Compute the attention of each prompt row's new tokens, whose keys are in the cache already.

    A token attends to all keys up to its own, or to the last `window` of them (0: all).

    q [T.., >= H * D], rows contiguous within a head; cache [blocks, 2 KVH, block size, D], or
    such a cache of codes; block_tables int32 [slots, W]; slots, seq_lens int32 [R]; query_starts
    int32 [R + 1]; tile_ends int32 from plan_attention with the config's tokens; max_tokens,
    max_rows: no step has more prompt tokens and prompt rows; out [T.., H * D], written for tokens
    of prompt rows only; softcap: the bound of the scores; sinks float32 [H]: scores that only the
    softmax's denominator has.
    """
    if config.hopper:
        assert isinstance(cache, Tensor) and softcap is None
        prefill_hopper.prefill_hopper(
            q, cache, block_tables, slots, seq_lens, query_starts, tile_ends, out,
            num_heads=num_heads, max_tokens=max_tokens, max_rows=max_rows, window=window,
            scale=scale * LOG2_E.value, sinks=sinks,
        )  # fmt: skip
        return
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads = twice_kv_heads // 2
    group = num_heads // kv_heads
    tokens = config.tokens(group)
    rows = max(config.rows, next_power_of_2(group))
    grid = (kv_heads, cdiv(max_tokens, tokens) + max_rows)
    # With narrow heads the copies would have less than the hardware moves at once.
    memory, numbers, numbers_stride, code_format = parts_of(cache)
    bulk = (
        config.bulk
        and not code_format
        and page % config.keys == 0
        and dim in (64, 128, 256)
        and memory.is_contiguous()
    )
    rows_of_cache = (
        TensorDescriptor(memory, [memory.numel() // dim, dim], [dim, 1], [config.keys, dim])
        if bulk
        else memory
    )
    # Without the tensor cores of Hopper the two halves of a byte take more registers.
    more_warps = code_format == "int4" and not has_pdl(q.device)
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    _prefill[grid](
        q,
        memory,
        rows_of_cache,
        block_tables,
        slots,
        seq_lens,
        query_starts,
        tile_ends,
        out,
        q.stride(0),
        block_tables.stride(0),
        cache.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        sinks,
        numbers,
        numbers_stride,
        kv_heads,
        group,
        dim,
        max(16, next_power_of_2(dim)),
        page,
        rows,
        config.keys,
        tokens,
        window,
        softcap,
        tile_ends.shape[0],
        bulk,
        "ieee",
        code_format,
        num_warps=2 * config.num_warps if more_warps else config.num_warps,
        num_stages=config.num_stages,
        **limit,
        **pdl(q),
    )
