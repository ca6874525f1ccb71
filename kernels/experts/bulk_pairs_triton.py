"""The products of experts in 16 bits for many pairs, where the bulk copy engine loads matrices.

The pairs are sorted by expert (sorted_pairs_triton.py). Programs, one or more a multiprocessor,
take tile after tile: some pairs of an expert and a part of its matrix. One loop covers the steps of
all their tiles, so that the next tile is loading while one ends. The tiles of the same pairs are
neighbours and run at the same time; so are those of the same expert. The inner values lie in the
pairs' sorted order, so that the copy engine loads them too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestep.kernels.experts.common.expert_activation_triton import gated
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import BulkConfig, BulkConfigs
from sidestep.kernels.experts.common.sorted_pairs_triton import SortedPairs
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import cdiv, num_processors, pdl

_ALIGNED = 16
"""Bytes of which the copy engine's rows are a multiple."""


@triton.jit
def _added(acc, value, w, SWAPPED: tl.constexpr):
    """Return acc + value w^T, or its transpose."""
    if SWAPPED:
        return tl.dot(w, value.T, acc, input_precision="ieee")
    else:
        return tl.dot(value, w.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["P"])
def _bulk_gate_up(
    x,
    w_tiles,
    bias,
    order,
    experts,
    used,
    inner,
    P,
    D: tl.constexpr,
    F: tl.constexpr,
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
    """Write the inner values of all tiles' pairs, N columns of them at a time."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = (D + STEP - 1) // STEP
    PARTS: tl.constexpr = (F + N - 1) // N
    programs, first = tl.num_programs(0), tl.program_id(0)
    total = tl.load(used) * PARTS
    acc = tl.zeros([N, M] if SWAPPED else [M, 2 * N], tl.float32)
    acc_up = acc
    for index in tl.range(0, tl.cdiv(tl.maximum(total - first, 0), programs) * STEPS):
        place = first + index // STEPS * programs
        step = index % STEPS
        tile = place // PARTS
        column = place % PARTS * N
        expert = tl.load(experts + tile)
        pairs = tl.load(order + tile * M + tl.arange(0, M))
        steps = step * STEP + tl.arange(0, STEP)
        tokens = x + (tl.minimum(pairs, P - 1) // CHOSEN).to(tl.int64)[:, None] * D
        if D % STEP == 0:
            value = tl.load(tokens + steps[None, :])
        else:
            value = tl.load(tokens + steps[None, :], mask=(steps < D)[None, :], other=0.0)
        if SWAPPED:
            # A reshaped tile of both would have to go through registers.
            w = w_tiles.load([2 * expert, column, step * STEP]).reshape(N, STEP)
            acc = tl.dot(w, value.T, acc, input_precision="ieee")
            w = w_tiles.load([2 * expert + 1, column, step * STEP]).reshape(N, STEP)
            acc_up = tl.dot(w, value.T, acc_up, input_precision="ieee")
        else:
            w = w_tiles.load([2 * expert, column, step * STEP]).reshape(2 * N, STEP)
            acc = tl.dot(value, w.T, acc, input_precision="ieee")
        if step == STEPS - 1:
            dtype: tl.constexpr = inner.dtype.element_ty
            columns = column + tl.arange(0, N)
            rows = (tile * M + tl.arange(0, M)).to(tl.int64) * F
            if SWAPPED:
                gate, up = acc, acc_up
                columns, rows = columns[:, None], rows[None, :]
            else:
                gate, up = acc.reshape(M, 2, N).permute(0, 2, 1).split()
                columns, rows = columns[None, :], rows[:, None]
            if bias is not None:
                own = bias + expert.to(tl.int64) * 2 * F + columns
                gate += tl.load(own, mask=columns < F, other=0.0).to(tl.float32)
                up += tl.load(own + F, mask=columns < F, other=0.0).to(tl.float32)
            activated = gated(gate, up, dtype, GELU, ALPHA, LIMIT).to(dtype)
            tl.store(inner + rows + columns, activated, mask=columns < F)
            acc = tl.zeros([N, M] if SWAPPED else [M, 2 * N], tl.float32)
            acc_up = acc


@triton.jit(do_not_specialize=["P"])
def _bulk_down(
    inner_tiles,
    w_tiles,
    bias,
    order,
    experts,
    used,
    out,
    P,
    D: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the results of all pairs, N columns of them at a time."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: tl.constexpr = (F + STEP - 1) // STEP
    PARTS: tl.constexpr = (D + N - 1) // N
    programs, first = tl.num_programs(0), tl.program_id(0)
    total = tl.load(used) * PARTS
    acc = tl.zeros([N, M] if SWAPPED else [M, N], tl.float32)
    for index in tl.range(0, tl.cdiv(tl.maximum(total - first, 0), programs) * STEPS):
        place = first + index // STEPS * programs
        step = index % STEPS
        tile = place // PARTS
        column = place % PARTS * N
        expert = tl.load(experts + tile)
        value = inner_tiles.load([tile * M, step * STEP])
        w = w_tiles.load([expert, column, step * STEP]).reshape(N, STEP)
        acc = _added(acc, value, w, SWAPPED)
        if step == STEPS - 1:
            pairs = tl.load(order + tile * M + tl.arange(0, M))
            columns = column + tl.arange(0, N)
            rows = pairs.to(tl.int64) * D
            if SWAPPED:
                inside = (pairs < P)[None, :] & (columns < D)[:, None]
                columns, rows = columns[:, None], rows[None, :]
            else:
                inside = (pairs < P)[:, None] & (columns < D)[None, :]
                columns, rows = columns[None, :], rows[:, None]
            if bias is not None:
                own = bias + expert.to(tl.int64) * D + columns
                acc += tl.load(own, mask=columns < D, other=0.0).to(tl.float32)
            tl.store(out + rows + columns, acc.to(out.dtype.element_ty), mask=inside)
            acc = tl.zeros([N, M] if SWAPPED else [M, N], tl.float32)


def can_be_bulk(x: Tensor, *matrices: Tensor) -> bool:
    """Return whether a Hopper GPU's copy engine can read these: rows and addresses are aligned."""
    return is_hopper(x.device) and all(
        part.shape[-1] * part.element_size() % _ALIGNED == 0
        and (part.device.type == "meta" or part.data_ptr() % _ALIGNED == 0)
        for part in (x, *matrices)
    )


def _programs(tiles: int, parts: int, c: BulkConfig, x: Tensor) -> tuple[int]:
    return (min(tiles * parts, c.programs * num_processors(x.device)),)


def multiply_bulk(
    x: Tensor,
    chosen: int,
    pairs: SortedPairs,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: tuple[bool, float | None, float | None],
    configs: BulkConfigs,
) -> Tensor:
    """Return the results of all pairs, [T * k, D]. activation: `gelu`, alpha and limit of a clamp.

    pairs: in tiles of as many as the configurations say.
    """
    (rows, width), experts, inner_width = x.shape, len(down.values), gate_up.num_rows // 2
    tiles, m, kind = len(pairs.experts), configs.pairs, pdl(x)
    inner = x.new_empty(tiles * m, inner_width)
    c = configs.gate_up
    step = c.step_bytes // x.element_size()
    w_tiles = TensorDescriptor(
        gate_up.values,
        [2 * experts, inner_width, width],
        [inner_width * width, width, 1],
        [1 if c.swapped else 2, c.columns, step],
    )
    _bulk_gate_up[_programs(tiles, cdiv(inner_width, c.columns), c, x)](
        x,
        w_tiles,
        gate_up.bias,
        *pairs,
        inner,
        rows * chosen,
        width,
        inner_width,
        chosen,
        m,
        c.columns,
        step,
        c.swapped,
        *activation,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    results = x.new_empty(rows * chosen, width)
    c = configs.down
    step = c.step_bytes // x.element_size()
    w_tiles = TensorDescriptor(
        down.values,
        [experts, width, inner_width],
        [width * inner_width, inner_width, 1],
        [1, c.columns, step],
    )
    inner_tiles = TensorDescriptor(inner, list(inner.shape), [inner_width, 1], [m, step])
    _bulk_down[_programs(tiles, cdiv(width, c.columns), c, x)](
        inner_tiles,
        w_tiles,
        down.bias,
        *pairs,
        results,
        rows * chosen,
        width,
        inner_width,
        m,
        c.columns,
        step,
        c.swapped,
        num_warps=c.warps,
        num_stages=c.stages,
        **kind,
    )
    return results
