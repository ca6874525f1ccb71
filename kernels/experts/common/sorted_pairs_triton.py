"""Sorting of the pairs of a token and an expert by their experts; and their sums.

The kernels here are in Triton. On a Hopper GPU, sorted_pairs_hopper.py sorts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.common import sorted_pairs_hopper
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs, room_for_pairs
from sidestep.kernels.l2_triton import forget
from sidestep.kernels.launch import cdiv, has_pdl, next_power_of_2, pdl
from sidestep.kernels.ops.rms_norm import RmsNorm, WholeNorm
from sidestep.kernels.ops.routing import Routed

_AT_ONCE = 1024
"""Pairs that a sorting program looks at in a turn. With more, few programs would run at once."""
_SHARES = tl.constexpr(16)
"""Programs that share the pairs for each expert, at most."""
_LINE, _IN_L2 = 128, 16 << 20
"""Bytes of a line of L2, and of results at most that it forgets when they are read. Larger ones are
not in it."""


@triton.jit(do_not_specialize=["P", "share"])
def _count_pairs(
    ids,
    counts,
    P,
    share,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert in each share: counts [experts, _SHARES]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, number = tl.program_id(0), tl.program_id(1)
    found = tl.zeros([BLOCK], tl.int32)
    stop = tl.minimum((number + 1) * share, P)
    for at in range(number * share, stop, BLOCK):
        pairs = at + tl.arange(0, BLOCK)
        found += (tl.load(ids + pairs, mask=pairs < stop, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert * _SHARES + number, tl.sum(found, 0))


@triton.jit(do_not_specialize=["P", "share", "tiles"])
def _place_pairs(
    ids,
    counts,
    order,
    experts,
    used,
    progress,
    P,
    share,
    tiles,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a share's pairs of an expert behind its earlier ones and those of earlier experts.

    The first share's program also fills the expert's pairs up with P to whole tiles, and writes
    experts, the expert of each tile: E for tiles that are not needed. It also sets progress to 0.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, number = tl.program_id(0), tl.program_id(1)
    all_experts, all_shares = tl.arange(0, WIDTH)[:, None], tl.arange(0, _SHARES)[None, :]
    known = (all_experts < E) & (all_shares < tl.num_programs(1))
    each = tl.load(counts + all_experts * _SHARES + all_shares, mask=known, other=0)
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
        rest = first * M + size + tl.arange(0, FILL)
        tl.store(order + rest, tl.zeros([FILL], tl.int32) + P, mask=rest < (first + own) * M)
        for tile in range(first, first + own):
            tl.store(experts + tile, expert)
            tl.store(progress + 1 + tile, 0)
        if expert == E - 1:
            tl.store(used, first + own)
            tl.store(progress, 0)
            for tile in range(first + own, tiles):
                tl.store(experts + tile, E)


@triton.jit
def _combine(
    results,
    ids,
    weights,
    out,
    norm,
    normed,
    eps,
    D: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
    SOME: tl.constexpr,
    LINES: tl.constexpr,
    LINES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a token's sum, and its norm if there is the weight of one.

    LINES: lines of 128 bytes of a token's results, which nobody reads afterwards; 0 to keep them.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N)
    inside = columns < D
    if norm is not None:
        factor = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([N], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        stop = D
        if SOME:
            stop = tl.where(tl.load(ids + pair) < 0, 0, D)
        result = tl.load(results + pair * D + columns, mask=columns < stop, other=0.0)
        total += tl.load(weights + pair) * result.to(tl.float32)
    target = out + token * D + columns
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = total.to(dtype)
    tl.store(target, result, mask=inside)
    if LINES > 0:
        # All threads have read them.
        tl.debug_barrier()
        own = tl.minimum(tl.arange(0, LINES_BLOCK), LINES - 1)
        forget((results + token * CHOSEN * D).to(tl.int64) + own * 128)
    if norm is not None:
        value = result.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
        made = ((value * scale).to(dtype).to(tl.float32) * factor).to(dtype)
        tl.store(normed + token * D + columns, made, mask=inside)


def sort_pairs(ids: Tensor, num_experts: int, in_tile: int) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert.

    ids: int32 [T, k]. Pairs with a negative id are left out. in_tile: pairs of a tile.
    """
    out = room_for_pairs(ids, num_experts, in_tile)
    if sorted_pairs_hopper.suits(ids, num_experts):
        sorted_pairs_hopper.sort_on_hopper(ids, num_experts, in_tile, out)
    else:
        sort_in_triton(ids, num_experts, in_tile, out)
    return out


def sort_in_triton(ids: Tensor, num_experts: int, in_tile: int, out: SortedPairs) -> None:
    """Write the pairs of ids [T, k] to `out`, as `sort_pairs` returns them."""
    pairs, kind = ids.numel(), pdl(ids)
    shares = min(_SHARES.value, cdiv(pairs, _AT_ONCE))
    share = cdiv(cdiv(pairs, shares), _AT_ONCE) * _AT_ONCE
    counts = torch.empty(num_experts * _SHARES.value, dtype=torch.int32, device=ids.device)
    grid = num_experts, shares
    _count_pairs[grid](ids, counts, pairs, share, _AT_ONCE, num_warps=4, **kind)
    _place_pairs[grid](
        ids,
        counts,
        *out,
        pairs,
        share,
        len(out.experts),
        num_experts,
        next_power_of_2(num_experts),
        in_tile,
        next_power_of_2(in_tile),
        _AT_ONCE,
        num_warps=4,
        **kind,
    )


def _lines_to_forget(results: Tensor, chosen: int) -> int:
    """Return the lines of a token's results that L2 forgets when they are read, or 0."""
    size = chosen * results.shape[1] * results.element_size()
    whole = size % _LINE == 0 and results.data_ptr() % _LINE == 0
    forgets = has_pdl(results.device) and whole and results.nbytes <= _IN_L2
    return size // _LINE if forgets else 0


def combine_pairs(
    results: Tensor,
    routed: Routed,
    out: Tensor,
    *,
    add: bool,
    some: bool,
    norm: RmsNorm | None = None,
) -> WholeNorm | None:
    """Write each token's weighted sum of its pairs' results [T * k, D] to out [T, D], or add it.

    The results' memory may have no values afterwards. Return the result of the norm that `out` goes
    through next, if there is one that computes anything.
    """
    (rows, width), chosen = out.shape, routed.ids.shape[1]
    block = next_power_of_2(width)
    lines = _lines_to_forget(results, chosen)
    made = WholeNorm(torch.empty_like(out)) if norm is not None and norm.may_begin else None
    _combine[(rows,)](
        results,
        *routed,
        out,
        None if made is None or norm is None else norm.weight,
        None if made is None else made.normed,
        0.0 if norm is None else norm.eps,
        width,
        chosen,
        block,
        add,
        some,
        lines,
        next_power_of_2(lines),
        num_warps=max(1, min(16, block // 512)),
        **pdl(out),
    )
    return made
