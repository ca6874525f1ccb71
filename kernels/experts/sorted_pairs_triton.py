"""Sorting of the pairs of a token and an expert by their experts, in Triton; and their sums.

Sorted pairs lie in tiles of one expert. The number of tiles is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.routing import Routed

_FEW_AT_ONCE, _MANY_AT_ONCE = 1024, 8192
"""Pairs that a sorting program looks at in a turn."""


@triton.jit(do_not_specialize=["P"])
def _count_pairs(ids, counts, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of each expert, one program an expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for at in range(0, P, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        found += (tl.load(ids + pairs, mask=pairs < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["P", "tiles"])
def _place_pairs(
    ids,
    counts,
    order,
    experts,
    used,
    P,
    tiles,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write an expert's pairs behind those of earlier experts, filled up with P to whole tiles.

    experts: the expert of each tile; E for tiles that are not needed.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    all_experts = tl.arange(0, WIDTH)
    sizes = tl.load(counts + all_experts, mask=all_experts < E, other=0)
    needed = (sizes + M - 1) // M
    first = tl.sum(tl.where(all_experts < expert, needed, 0), 0)
    own = tl.sum(tl.where(all_experts == expert, needed, 0), 0)
    place = first * M
    for at in range(0, P, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        mine = (tl.load(ids + pairs, mask=pairs < P, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, pairs, mask=mine == 1)
        place += tl.sum(mine, 0)
    rest = place + tl.arange(0, M)
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


def sort_pairs(ids: Tensor, num_experts: int, in_tile: int) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert.

    ids: int32 [T, k]. Pairs with a negative id are left out. in_tile: pairs of a tile.
    """
    pairs = ids.numel()
    tiles = triton.cdiv(pairs, in_tile) + min(pairs, num_experts)
    counts, order, experts, used = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, tiles * in_tile, tiles, 1)
    )
    grid, kind = (num_experts,), pdl(ids)
    few = pairs <= 2 * _FEW_AT_ONCE
    at_once, warps = (_FEW_AT_ONCE, 4) if few else (_MANY_AT_ONCE, 8)
    _count_pairs[grid](ids, counts, pairs, at_once, num_warps=warps, **kind)
    _place_pairs[grid](
        ids,
        counts,
        order,
        experts,
        used,
        pairs,
        tiles,
        num_experts,
        triton.next_power_of_2(num_experts),
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
