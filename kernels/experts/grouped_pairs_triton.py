"""The products of experts for many pairs of a token and an expert, in Triton.

The pairs are sorted by expert. Each program multiplies a tile of pairs of one expert with a part of
its matrix. There are programs for the most tiles that may be needed, and those that are not needed
end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.common.expert_activation_triton import gated
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import SortedConfigs
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.launch import cdiv, pdl

_STEP_BYTES = 128
"""Bytes of the pairs' inputs in a step."""


@triton.jit
def _added(acc, value, w, SWAPPED: tl.constexpr):
    """Return acc + value w^T, or its transpose."""
    if SWAPPED:
        acc = tl.dot(w, value.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["P"])
def _grouped_gate_up(
    x,
    weight,
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
            w = tl.load(weight + rows * D + steps, mask=steps < D, other=0.0)
            gate = _added(gate, value, w, SWAPPED)
            w = tl.load(weight + (rows + F) * D + steps, mask=steps < D, other=0.0)
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
            w = tl.load(weight + rows * F + steps, mask=steps < F, other=0.0)
            acc = _added(acc, value, w, SWAPPED)
        if SWAPPED:
            acc = acc.T
        if bias is not None:
            own = bias + expert * D + columns
            acc += tl.load(own, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        target = out + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        inside = (pairs < P)[:, None] & (columns < D)[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


def multiply_grouped(
    x: Tensor,
    chosen: int,
    tiles: SortedPairs,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: tuple[bool, float | None, float | None],
    configs: SortedConfigs,
) -> Tensor:
    """Return the results of all pairs, [T * k, D]. activation: `gelu`, alpha and limit of a clamp.

    tiles: of as many pairs as the configurations say.
    """
    (rows, width), experts, inner_width = x.shape, gate_up.num_experts, gate_up.num_rows // 2
    pairs, kind = rows * chosen, pdl(x)
    inner = x.new_empty(pairs, inner_width)
    c = configs.gate_up
    _grouped_gate_up[(len(tiles.experts), cdiv(inner_width, c.columns))](
        x,
        gate_up.values,
        gate_up.bias,
        tiles.order,
        tiles.experts,
        inner,
        pairs,
        width,
        inner_width,
        experts,
        chosen,
        configs.pairs,
        c.columns,
        _STEP_BYTES // x.element_size(),
        c.swapped,
        *activation,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    results = x.new_empty(pairs, width)
    c = configs.down
    _grouped_down[(len(tiles.experts), cdiv(width, c.columns))](
        inner,
        down.values,
        down.bias,
        tiles.order,
        tiles.experts,
        results,
        pairs,
        width,
        inner_width,
        experts,
        configs.pairs,
        c.columns,
        _STEP_BYTES // x.element_size(),
        c.swapped,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    return results
