"""The products of a mixture of experts in Triton.

A pair is a token and one of its experts. For a few pairs, each program multiplies one pair and
streams rows of its expert's matrix. For more, the pairs are sorted by expert, and each program
multiplies some pairs of one expert with a part of its matrix. Their number is known on the device
alone. So as many programs are launched as may be needed, and those that are not needed end at once.

With expert parallelism, the pairs of other ranks' experts have negative ids. They are not sorted,
read no matrix, and count as zero.

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
from sidestep.kernels.products.expert_matrix import ExpertMatrix
from sidestep.kernels.quantized.expert_weights_triton import expert_weights
from sidestep.kernels.triton.silu_mul_triton import gated_silu

_FEW_COLUMNS, _FEW_STEP, _FEW_PACKED_STEP = 16, 128, 256
"""Outputs of a program for a few pairs, and its step along the inputs. With packed weights that is
longer, so that a thread loads 16 bytes."""
_ROWS, _COLUMNS, _STEP_BYTES = 64, 64, 128
"""Tile of a program for many pairs: pairs, outputs, and bytes of its step along the inputs."""
_SORTED_AT_ONCE = 1024
"""Pairs that a sorting program looks at in a turn."""


@triton.jit
def _gated(gate, up, dtype, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return act(gate) * up in float32, or clamped_swiglu where there is a LIMIT."""
    if LIMIT is not None:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT)
        up = tl.clamp(up.to(dtype).to(tl.float32), -LIMIT, LIMIT)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    elif GELU:
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
    scales,
    bias,
    ids,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    expert = tl.load(ids + pair).to(tl.int64)
    stop = D
    if SOME:
        stop = tl.where(expert < 0, 0, D)
    rows = (expert * 2 * F + tl.minimum(columns, F - 1))[:, None]
    gate = tl.zeros([N, STEP], tl.float32)
    up = tl.zeros([N, STEP], tl.float32)
    for at in range(0, stop, STEP):
        steps = at + tl.arange(0, STEP)
        inside = steps < D
        value = tl.load(x + pair // CHOSEN * D + steps, mask=inside, other=0.0).to(tl.float32)
        gate += (
            expert_weights(weight, scales, rows, at, D, STEP, FORM).to(tl.float32) * value[None, :]
        )
        up += (
            expert_weights(weight, scales, rows + F, at, D, STEP, FORM).to(tl.float32)
            * value[None, :]
        )
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        own = bias + expert * 2 * F + columns
        there = columns < (tl.where(expert < 0, 0, F) if SOME else F)
        gate_sum += tl.load(own, mask=there, other=0.0).to(tl.float32)
        up_sum += tl.load(own + F, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    gated = _gated(gate_sum, up_sum, dtype, GELU, ALPHA, LIMIT)
    tl.store(out + pair * F + columns, gated.to(dtype), mask=columns < F)


@triton.jit
def _expert_down(
    inner,
    weight,
    scales,
    bias,
    ids,
    weights,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    FORM: tl.constexpr,
    ADD: tl.constexpr,
    SOME: tl.constexpr,
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
        rows = (expert * D + tl.minimum(columns, D - 1))[:, None]
        acc = tl.zeros([N, STEP], tl.float32)
        stop = F
        if SOME:
            stop = tl.where(expert < 0, 0, F)
        for at in range(0, stop, STEP):
            steps = at + tl.arange(0, STEP)
            inside = steps < F
            value = tl.load(inner + pair * F + steps, mask=inside, other=0.0).to(tl.float32)
            w = expert_weights(weight, scales, rows, at, F, STEP, FORM)
            acc += w.to(tl.float32) * value[None, :]
        result = tl.sum(acc, 1)
        if bias is not None:
            own = bias + expert * D + columns
            there = columns < (tl.where(expert < 0, 0, D) if SOME else D)
            result += tl.load(own, mask=there, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * result
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
    scales,
    bias,
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
    FORM: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
        rows = (expert * 2 * F + tl.minimum(columns, F - 1))[:, None]
        gate = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
        for at in range(0, D, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(tokens + steps, mask=steps < D, other=0.0)
            w = expert_weights(weight, scales, rows, at, D, STEP, FORM).to(value.dtype)
            gate = tl.dot(value, w.T, gate, input_precision="ieee")
            w = expert_weights(weight, scales, rows + F, at, D, STEP, FORM).to(value.dtype)
            up = tl.dot(value, w.T, up, input_precision="ieee")
        if bias is not None:
            own = bias + expert * 2 * F + columns
            gate += tl.load(own, mask=columns < F, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + F, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        target = out + pairs.to(tl.int64)[:, None] * F + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < F)[None, :]
        gated = _gated(gate, up, dtype, GELU, ALPHA, LIMIT)
        tl.store(target, gated.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["P"])
def _grouped_down(
    inner,
    weight,
    scales,
    bias,
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
    FORM: tl.constexpr,
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
        rows = (expert * D + tl.minimum(columns, D - 1))[:, None]
        acc = tl.zeros([M, N], tl.float32)
        for at in range(0, F, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(values + steps, mask=steps < F, other=0.0)
            w = expert_weights(weight, scales, rows, at, F, STEP, FORM).to(value.dtype)
            acc = tl.dot(value, w.T, acc, input_precision="ieee")
        if bias is not None:
            own = bias + expert * D + columns
            acc += tl.load(own, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        target = out + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < D)[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


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
    """Pairs in tiles of _ROWS, each of one expert."""

    order: Tensor
    """int32: the pairs' numbers; those that fill a tile up are the number of pairs."""
    experts: Tensor
    """int32: the expert of each tile; the number of experts for tiles that are not needed."""


def sort_pairs(ids: Tensor, num_experts: int) -> SortedPairs:
    """Return the pairs sorted by expert, and by number within an expert.

    ids: int32 [T, k]. Pairs with a negative id are left out.
    """
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
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    out: Tensor,
    *,
    add: bool,
    gelu: bool = False,
    clamped: tuple[float, float] | None = None,
    few: bool | None = None,
    some: bool = False,
) -> None:
    """Write the weighted sum of each token's experts to out [T, D], or add it.

    x [T, D]; gate_up [E, 2 F, D], the gate's rows first; down [E, D, F]; all contiguous, and of one
    type where they are not coded. clamped: alpha and limit of clamped_swiglu, if that is the
    activation. few: whether each pair is multiplied by itself; None for the usual choice. some:
    whether pairs may have negative ids, which add nothing.
    """
    (rows, width), experts, chosen = x.shape, len(down.values), routed.ids.shape[1]
    inner_width = gate_up.num_rows // 2
    if rows == 0:
        return
    gate_up_parts, down_parts = (
        (matrix.bytes, matrix.scales, matrix.bias) for matrix in (gate_up, down)
    )
    gate_up_form, down_form = gate_up.form, down.form
    activation = (gelu, *(clamped or (None, None)))
    pairs, kind = rows * chosen, pdl(x)
    inner = x.new_empty(pairs, inner_width)
    if few_pairs(rows, chosen, experts) if few is None else few:
        step = _FEW_PACKED_STEP if down.values.dtype == torch.uint8 else _FEW_STEP
        sizes = width, inner_width, chosen, _FEW_COLUMNS, step
        _expert_gate_up[(pairs, triton.cdiv(inner_width, _FEW_COLUMNS))](
            x,
            *gate_up_parts,
            routed.ids,
            inner,
            *sizes,
            gate_up_form,
            *activation,
            some,
            num_warps=4,
            **kind,
        )
        _expert_down[(rows, triton.cdiv(width, _FEW_COLUMNS))](
            inner, *down_parts, *routed, out, *sizes, down_form, add, some, num_warps=4, **kind
        )
        return
    tiles = sort_pairs(routed.ids, experts)
    step = _STEP_BYTES // x.element_size()
    _grouped_gate_up[(len(tiles.experts), triton.cdiv(inner_width, _COLUMNS))](
        x,
        *gate_up_parts,
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
        gate_up_form,
        *activation,
        num_warps=4,
        num_stages=3,
        **kind,
    )
    results = x.new_empty(pairs, width)
    _grouped_down[(len(tiles.experts), triton.cdiv(width, _COLUMNS))](
        inner,
        *down_parts,
        *tiles,
        results,
        pairs,
        width,
        inner_width,
        experts,
        _ROWS,
        _COLUMNS,
        step,
        down_form,
        num_warps=4,
        num_stages=3,
        **kind,
    )
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        results, *routed, out, width, chosen, block, add, some, num_warps=4, **kind
    )
