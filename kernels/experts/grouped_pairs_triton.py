"""The products of experts for many pairs of a token and an expert, in Triton.

The pairs are sorted by expert. Each program multiplies a tile of pairs of one expert with a part of
its matrix. There are programs for the most tiles that may be needed, and those that are not needed
end at once. A last kernel adds each token's results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.expert_activation_triton import gated
from sidestep.kernels.experts.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.expert_weights_triton import expert_weights
from sidestep.kernels.experts.experts_config import SortedConfigs
from sidestep.kernels.experts.sorted_pairs_triton import sort_pairs
from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.routing import Routed


@triton.jit
def _added(acc, value, w, SWAPPED: tl.constexpr):
    """Return acc + value w^T, or its transpose."""
    w = w.to(value.dtype)
    if SWAPPED:
        acc = tl.dot(w, value.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    return acc


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
    SWAPPED: tl.constexpr,
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
        gate = tl.zeros([N, M] if SWAPPED else [M, N], tl.float32)
        up = tl.zeros([N, M] if SWAPPED else [M, N], tl.float32)
        for at in range(0, D, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(tokens + steps, mask=steps < D, other=0.0)
            w = expert_weights(weight, scales, rows, None, at, D, STEP, FORM)
            gate = _added(gate, value, w, SWAPPED)
            w = expert_weights(weight, scales, rows + F, None, at, D, STEP, FORM)
            up = _added(up, value, w, SWAPPED)
        if SWAPPED:
            gate, up = gate.T, up.T
        if bias is not None:
            own = bias + expert * 2 * F + columns
            gate += tl.load(own, mask=columns < F, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + F, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        target = out + pairs.to(tl.int64)[:, None] * F + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < F)[None, :]
        activated = gated(gate, up, dtype, GELU, ALPHA, LIMIT)
        tl.store(target, activated.to(dtype), mask=inside)


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
    SWAPPED: tl.constexpr,
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
        acc = tl.zeros([N, M] if SWAPPED else [M, N], tl.float32)
        for at in range(0, F, STEP):
            steps = (at + tl.arange(0, STEP))[None, :]
            value = tl.load(values + steps, mask=steps < F, other=0.0)
            w = expert_weights(weight, scales, rows, None, at, F, STEP, FORM)
            acc = _added(acc, value, w, SWAPPED)
        if SWAPPED:
            acc = acc.T
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


def multiply_sorted(
    x: Tensor,
    routed: Routed,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    out: Tensor,
    activation: tuple[bool, float | None, float | None],
    configs: SortedConfigs,
    *,
    add: bool,
    some: bool,
) -> None:
    """Write or add what multiply_experts does. activation: `gelu`, alpha and limit of a clamp."""
    (rows, width), experts, chosen = x.shape, len(down.values), routed.ids.shape[1]
    inner_width, pairs, kind = gate_up.num_rows // 2, rows * chosen, pdl(x)
    inner = x.new_empty(pairs, inner_width)
    tiles = sort_pairs(routed.ids, experts, configs.pairs)
    c = configs.gate_up
    _grouped_gate_up[(len(tiles.experts), triton.cdiv(inner_width, c.columns))](
        x,
        gate_up.operand,
        gate_up.scales,
        gate_up.bias,
        *tiles,
        inner,
        pairs,
        width,
        inner_width,
        experts,
        chosen,
        configs.pairs,
        c.columns,
        c.step_bytes // x.element_size(),
        c.swapped,
        gate_up.form,
        *activation,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    results = x.new_empty(pairs, width)
    c = configs.down
    _grouped_down[(len(tiles.experts), triton.cdiv(width, c.columns))](
        inner,
        down.operand,
        down.scales,
        down.bias,
        *tiles,
        results,
        pairs,
        width,
        inner_width,
        experts,
        configs.pairs,
        c.columns,
        c.step_bytes // x.element_size(),
        c.swapped,
        down.form,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    block = min(1024, triton.next_power_of_2(width))
    _combine[(rows, triton.cdiv(width, block))](
        results, *routed, out, width, chosen, block, add, some, num_warps=4, **kind
    )
