"""Sorting of the pairs of a token and an expert by their experts, in Triton; and their sums.

Sorted pairs lie in tiles of one expert. The number of tiles is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import has_pdl, pdl
from sidestep.kernels.ops.routing import Routed
from sidestep.kernels.prefetch_triton import prefetch

_FEW_AT_ONCE, _MANY_AT_ONCE = 1024, 4096
"""Pairs that a sorting program looks at in a turn."""
_FEW_PAIRS = 8192
"""Pairs up to which a turn has the smaller number."""
_SHARES = 16
"""Programs that share the pairs for each expert, at most."""
_AHEAD = 1024
"""Bytes of each row of weights that are prefetched."""


@triton.jit
def _prefetch_rows(weight, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BYTES: tl.constexpr):
    """Prefetch bytes of the first ROWS rows of weights, each program a part of them."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    first = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * 128
    for at in range(first, ROWS, programs * 128):
        rows = tl.minimum(at + tl.arange(0, 128), ROWS - 1)
        prefetch(weight + rows.to(tl.int64) * COLUMNS, BYTES)


@triton.jit(do_not_specialize=["P", "share"])
def _count_pairs(
    ids,
    counts,
    weight,
    P,
    share,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert in each share: counts [experts, shares].

    ROWS: those of the weights to be prefetched; see _prefetch_rows.
    """
    if ROWS > 0:
        _prefetch_rows(weight, ROWS, COLUMNS, BYTES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, number = tl.program_id(0), tl.program_id(1)
    found = tl.zeros([BLOCK], tl.int32)
    stop = tl.minimum((number + 1) * share, P)
    for at in range(number * share, stop, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        found += (tl.load(ids + pairs, mask=pairs < stop, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert * tl.num_programs(1) + number, tl.sum(found, 0))


@triton.jit(do_not_specialize=["P", "share", "tiles"])
def _place_pairs(
    ids,
    counts,
    order,
    experts,
    used,
    P,
    share,
    tiles,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    HEIGHT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a share's pairs of an expert behind its earlier ones and those of earlier experts.

    The first share's program also fills the expert's pairs up with P to whole tiles, and writes
    experts, the expert of each tile: E for tiles that are not needed.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, number = tl.program_id(0), tl.program_id(1)
    all_experts, all_shares = tl.arange(0, WIDTH)[:, None], tl.arange(0, HEIGHT)[None, :]
    known = (all_experts < E) & (all_shares < SHARES)
    each = tl.load(counts + all_experts * SHARES + all_shares, mask=known, other=0)
    every, sizes = tl.arange(0, WIDTH), tl.sum(each, 1)
    needed = (sizes + M - 1) // M
    first = tl.sum(tl.where(every < expert, needed, 0), 0)
    own = tl.sum(tl.where(every == expert, needed, 0), 0)
    earlier = tl.where((all_experts == expert) & (all_shares < number), each, 0)
    place = first * M + tl.sum(tl.sum(earlier, 1), 0)
    stop = tl.minimum((number + 1) * share, P)
    for at in range(number * share, stop, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        mine = (tl.load(ids + pairs, mask=pairs < stop, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, pairs, mask=mine == 1)
        place += tl.sum(mine, 0)
    if number == 0:
        size = tl.sum(tl.where(every == expert, sizes, 0), 0)
        rest = first * M + size + tl.arange(0, M)
        tl.store(order + rest, tl.zeros([M], tl.int32) + P, mask=rest < (first + own) * M)
        for tile in range(first, first + own):
            tl.store(experts + tile, expert)
        if expert == E - 1:
            tl.store(used, first + own)
            for tile in range(first + own, tiles):
                tl.store(experts + tile, E)


@triton.jit
def _combine(
    results,
    ids,
    weights,
    out,
    D: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = columns < D
    total = tl.zeros([N], tl.float32)
    for place in range(CHOSEN):
        pair = token * CHOSEN + place
        stop = D
        if SOME:
            stop = tl.where(tl.load(ids + pair) < 0, 0, D)
        result = tl.load(results + pair * D + columns, mask=columns < stop, other=0.0)
        total += tl.load(weights + pair) * result.to(tl.float32)
    target = out + token * D + columns
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


class SortedPairs(NamedTuple):
    """Pairs in tiles, each of one expert."""

    order: Tensor
    """int32: the pairs' numbers; those that fill a tile up are the number of pairs."""
    experts: Tensor
    """int32: the expert of each tile; the number of experts for tiles that are not needed."""
    used: Tensor
    """int32 [1]: the number of tiles that are needed."""


def sort_pairs(
    ids: Tensor, num_experts: int, in_tile: int, ahead: Tensor | None = None, rows_ahead: int = 0
) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert.

    ids: int32 [T, k]. Pairs with a negative id are left out. in_tile: pairs of a tile. ahead:
    weights [.., K] whose first rows, as many as rows_ahead, will be read next: where the GPU can,
    their beginnings are prefetched while pairs are sorted.
    """
    pairs, kind = ids.numel(), pdl(ids)
    tiles = triton.cdiv(pairs, in_tile) + min(pairs, num_experts)
    at_once, warps = (_FEW_AT_ONCE, 4) if pairs <= _FEW_PAIRS else (_MANY_AT_ONCE, 4)
    shares = min(_SHARES, triton.cdiv(pairs, at_once))
    share = triton.cdiv(triton.cdiv(pairs, shares), at_once) * at_once
    counts, order, experts, used = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts * shares, tiles * in_tile, tiles, 1)
    )
    columns = 1 if ahead is None else ahead.shape[-1]
    rows = 0 if ahead is None or not has_pdl(ids.device) else rows_ahead
    num_bytes = 0 if ahead is None else min(_AHEAD, columns * ahead.element_size())
    grid = num_experts, shares
    _count_pairs[grid](
        ids, counts, ahead, pairs, share, at_once, rows, columns, num_bytes, num_warps=warps, **kind
    )
    _place_pairs[grid](
        ids,
        counts,
        order,
        experts,
        used,
        pairs,
        share,
        tiles,
        num_experts,
        triton.next_power_of_2(num_experts),
        shares,
        triton.next_power_of_2(shares),
        in_tile,
        at_once,
        num_warps=warps,
        **kind,
    )
    return SortedPairs(order, experts, used)


def combine_pairs(results: Tensor, routed: Routed, out: Tensor, *, add: bool, some: bool) -> None:
    """Write each token's weighted sum of its pairs' results [T * k, D] to out [T, D], or add it."""
    (rows, width), chosen = out.shape, routed.ids.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        results, *routed, out, width, chosen, block, add, some, num_warps=4, **pdl(out)
    )
