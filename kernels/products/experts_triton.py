"""The products of a mixture of experts in Triton.

A pair is a token and one of its experts. For a few pairs, each program multiplies one pair and
streams rows of its expert's matrix. For more, the pairs are sorted by expert, and each program
multiplies some pairs of one expert with a part of its matrix. Their number is known on the device
alone. So as many programs are launched as may be needed, and those that are not needed end at once.

No value is added atomically: each sum has one order, and a token's experts are added in the order
of its choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.routing import Routed
from sidestep.kernels.triton.silu_mul_triton import gated_silu

_FEW_COLUMNS, _FEW_STEP = 16, 128
"""Outputs of a program for a few pairs, and its step along the inputs."""
_ROWS, _COLUMNS, _STEP_BYTES = 64, 64, 128
"""Tile of a program for many pairs: pairs, outputs, and bytes of its step along the inputs."""
_SORTED_AT_ONCE = 1024
"""Pairs that a sorting program looks at in a turn."""


@triton.jit
def _gated(gate, up, dtype, GELU: tl.constexpr):
    """Return act(gate) * up in float32."""
    if GELU:
        gate = gate.to(dtype).to(tl.float32)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 1 + tanh(y) is 2 / (1 + exp(-2 y)).
        activated = (gate / (1.0 + tl.exp(-2.0 * inner))).to(dtype).to(tl.float32)
        return activated * up.to(dtype).to(tl.float32)
    else:
        return gated_silu(gate, up, dtype)


@triton.jit
def _expert_gate_up(
    x,
    weight,
    ids,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    expert = tl.load(ids + pair).to(tl.int64)
    rows = weight + (expert * 2 * F + tl.minimum(columns, F - 1))[:, None] * D
    gate = tl.zeros([N, STEP], tl.float32)
    up = tl.zeros([N, STEP], tl.float32)
    for at in range(0, D, STEP):
        steps = at + tl.arange(0, STEP)
        inside = steps < D
        value = tl.load(x + pair // CHOSEN * D + steps, mask=inside, other=0.0).to(tl.float32)
        source = rows + steps[None, :]
        gate += tl.load(source, mask=inside[None, :], other=0.0).to(tl.float32) * value[None, :]
        source += F * D
        up += tl.load(source, mask=inside[None, :], other=0.0).to(tl.float32) * value[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    gated = _gated(tl.sum(gate, 1), tl.sum(up, 1), dtype, GELU)
    tl.store(out + pair * F + columns, gated.to(dtype), mask=columns < F)


@triton.jit
def _expert_down(
    inner,
    weight,
    ids,
    weights,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for place in range(CHOSEN):
        pair = token * CHOSEN + place
        expert = tl.load(ids + pair).to(tl.int64)
        rows = weight + (expert * D + tl.minimum(columns, D - 1))[:, None] * F
        acc = tl.zeros([N, STEP], tl.float32)
        for at in range(0, F, STEP):
            steps = at + tl.arange(0, STEP)
            inside = steps < F
            value = tl.load(inner + pair * F + steps, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(rows + steps[None, :], mask=inside[None, :], other=0.0)
            acc += w.to(tl.float32) * value[None, :]
        total += tl.load(weights + pair) * tl.sum(acc, 1)
    target = out + token * D + columns
    if ADD:
        total += tl.load(target, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=columns < D)


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


@triton.jit(do_not_specialize=["P"])
def _grouped_gate_up(
    x,
    weight,
    order,
    experts,
    out,
    P,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < E:
        pairs = tl.load(order + tl.program_id(0) * M + tl.arange(0, M))
        columns = tl.program_id(1) * N + tl.arange(0, N)
        tokens = x + (tl.minimum(pairs, P - 1) // CHOSEN).to(tl.int64)[:, None] * D
        rows = weight + (expert * 2 * F + tl.minimum(columns, F - 1))[:, None] * D
        gate = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
        for at in range(0, D, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(tokens + steps, mask=steps < D, other=0.0)
            w = tl.load(rows + steps, mask=steps < D, other=0.0)
            gate = tl.dot(value, w.T, gate, input_precision="ieee")
            w = tl.load(rows + F * D + steps, mask=steps < D, other=0.0)
            up = tl.dot(value, w.T, up, input_precision="ieee")
        dtype: tl.constexpr = out.dtype.element_ty
        target = out + pairs.to(tl.int64)[:, None] * F + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < F)[None, :]
        tl.store(target, _gated(gate, up, dtype, GELU).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["P"])
def _grouped_down(
    inner,
    weight,
    order,
    experts,
    out,
    P,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < E:
        pairs = tl.load(order + tl.program_id(0) * M + tl.arange(0, M))
        columns = tl.program_id(1) * N + tl.arange(0, N)
        values = inner + tl.minimum(pairs, P - 1).to(tl.int64)[:, None] * F
        rows = weight + (expert * D + tl.minimum(columns, D - 1))[:, None] * F
        acc = tl.zeros([M, N], tl.float32)
        for at in range(0, F, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(values + steps, mask=steps < F, other=0.0)
            w = tl.load(rows + steps, mask=steps < F, other=0.0)
            acc = tl.dot(value, w.T, acc, input_precision="ieee")
        target = out + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < D)[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    results,
    weights,
    out,
    D: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    ADD: tl.constexpr,
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
        result = tl.load(results + pair * D + columns, mask=inside, other=0.0)
        total += tl.load(weights + pair) * result.to(tl.float32)
    target = out + token * D + columns
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


class SortedPairs(NamedTuple):
    """Pairs in tiles of _ROWS, each of one expert."""

    order: Tensor
    """int32: the pairs' numbers; those that fill a tile up are the number of pairs."""
    experts: Tensor
    """int32: the expert of each tile; the number of experts for tiles that are not needed."""


def sort_pairs(ids: Tensor, num_experts: int) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert. ids: int32 [T, k]."""
    pairs = ids.numel()
    tiles = triton.cdiv(pairs, _ROWS) + min(pairs, num_experts)
    counts, order, experts = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (num_experts, tiles * _ROWS, tiles)
    )
    grid, kind = (num_experts,), pdl(ids)
    _count_pairs[grid](ids, counts, pairs, _SORTED_AT_ONCE, num_warps=4, **kind)
    _place_pairs[grid](
        ids,
        counts,
        order,
        experts,
        pairs,
        tiles,
        num_experts,
        triton.next_power_of_2(num_experts),
        _ROWS,
        _SORTED_AT_ONCE,
        num_warps=4,
        **kind,
    )
    return SortedPairs(order, experts)


def few_pairs(rows: int, chosen: int, num_experts: int) -> bool:
    """Return whether each pair is multiplied by itself.

    Then no more matrices are read than there are, and nothing has to be sorted.
    """
    return rows * chosen <= num_experts


def multiply_experts(
    x: Tensor,
    routed: Routed,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    *,
    add: bool,
    gelu: bool = False,
    few: bool | None = None,
) -> None:
    """Write the weighted sum of each token's experts to out [T, D], or add it.

    x [T, D]; gate_up [E, 2 F, D], the gate's rows first; down [E, D, F]; all contiguous and of one
    type. few: whether each pair is multiplied by itself; None for the usual choice.
    """
    (rows, width), (experts, inner_width), chosen = x.shape, down.shape[::2], routed.ids.shape[1]
    if rows == 0:
        return
    pairs, kind = rows * chosen, pdl(x)
    inner = x.new_empty(pairs, inner_width)
    if few_pairs(rows, chosen, experts) if few is None else few:
        sizes = width, inner_width, chosen, _FEW_COLUMNS, _FEW_STEP
        _expert_gate_up[(pairs, triton.cdiv(inner_width, _FEW_COLUMNS))](
            x, gate_up, routed.ids, inner, *sizes, gelu, num_warps=4, **kind
        )
        _expert_down[(rows, triton.cdiv(width, _FEW_COLUMNS))](
            inner, down, routed.ids, routed.weights, out, *sizes, add, num_warps=4, **kind
        )
        return
    tiles = sort_pairs(routed.ids, experts)
    step = _STEP_BYTES // x.element_size()
    _grouped_gate_up[(len(tiles.experts), triton.cdiv(inner_width, _COLUMNS))](
        x,
        gate_up,
        *tiles,
        inner,
        pairs,
        width,
        inner_width,
        experts,
        chosen,
        _ROWS,
        _COLUMNS,
        step,
        gelu,
        num_warps=4,
        num_stages=3,
        **kind,
    )
    results = x.new_empty(pairs, width)
    _grouped_down[(len(tiles.experts), triton.cdiv(width, _COLUMNS))](
        inner,
        down,
        *tiles,
        results,
        pairs,
        width,
        inner_width,
        experts,
        _ROWS,
        _COLUMNS,
        step,
        num_warps=4,
        num_stages=3,
        **kind,
    )
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        results, routed.weights, out, width, chosen, block, add, num_warps=4, **kind
    )
