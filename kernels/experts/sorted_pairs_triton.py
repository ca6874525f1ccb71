"""Sorting of the pairs of a token and an expert by their experts, in Triton.

Sorted pairs lie in tiles of one expert. The number of tiles is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl

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
        for tile in range(first + own, tiles):
            tl.store(experts + tile, E)


class SortedPairs(NamedTuple):
    """Pairs in tiles, each of one expert."""

    order: Tensor
    """int32: the pairs' numbers; those that fill a tile up are the number of pairs."""
    experts: Tensor
    """int32: the expert of each tile; the number of experts for tiles that are not needed."""


def sort_pairs(ids: Tensor, num_experts: int, in_tile: int) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert.

    ids: int32 [T, k]. Pairs with a negative id are left out. in_tile: pairs of a tile.
    """
    pairs = ids.numel()
    tiles = triton.cdiv(pairs, in_tile) + min(pairs, num_experts)
    counts, order, experts = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, tiles * in_tile, tiles)
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
        pairs,
        tiles,
        num_experts,
        triton.next_power_of_2(num_experts),
        in_tile,
        at_once,
        num_warps=warps,
        **kind,
    )
    return SortedPairs(order, experts)
