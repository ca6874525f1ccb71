"""The products of experts in 16 bits for prompts, in Gluon, for Hopper.

The pairs are sorted by expert (sorted_pairs_triton.py). Programs, one a multiprocessor, take tile
after tile. Four warps of a program load all its tiles into a ring, and eight multiply them: so the
tensor cores wait for neither addresses nor barriers of loads, and the next tile is loading while
one ends. Triton cannot express warps with different work on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sidestep.kernels.experts.expert_activation_triton import gated
from sidestep.kernels.experts.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.experts_config import LargeConfig
from sidestep.kernels.experts.sorted_pairs_triton import SortedPairs
from sidestep.kernels.launch import num_processors, pdl

# Triton 3.9 has these by other names than 3.6.
_bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_bulk_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _load_tiles(
    x,
    x_tiles,
    w_tiles,
    order,
    experts,
    used,
    ring,
    up_ring,
    x_ring,
    full,
    empty,
    P,
    K: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load the steps of all tiles of a program, as soon as slots of the ring are empty."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = (OUTPUTS + N - 1) // N
    ROWS: gl.constexpr = OUTPUTS * (2 if GATED else 1)
    BYTES: gl.constexpr = (2 * N if GATED else N + M) * STEP * 2
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, WIDE))
    columns = gl.arange(0, STEP, layout=gl.SliceLayout(0, WIDE))
    total = gl.load(used) * PARTS
    count = 0
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = place // PARTS
        column = place % PARTS * N
        row = gl.load(experts + tile) * ROWS + column
        if GATED:
            pairs = gl.load(order + tile * M + rows)
            tokens = (gl.minimum(pairs, P - 1) // CHOSEN).to(gl.int64)
            values = x + tokens[:, None] * K + columns[None, :]
        for at in range(0, K, STEP):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), count // STAGES & 1 ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            _bulk_load(w_tiles, [row, at], bar, ring.index(slot))
            if GATED:
                _bulk_load(w_tiles, [row + OUTPUTS, at], bar, up_ring.index(slot))
                async_copy.async_copy_global_to_shared(x_ring.index(slot), values + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                _bulk_load(x_tiles, [tile * M, at], bar, x_ring.index(slot))
            count += 1


@gluon.jit
def _asked(w, value, acc, SWAPPED: gl.constexpr):
    """Return acc, to which the tensor cores will add value w^T, or its transpose."""
    if SWAPPED:
        return warpgroup_mma(w, value.permute([1, 0]), acc, is_async=True)
    else:
        return warpgroup_mma(value, w.permute([1, 0]), acc, is_async=True)


@gluon.jit
def _biases(bias, columns, there, SIDE: gl.constexpr):
    """Return the biases of columns, which are the dimension 1 - SIDE."""
    return gl.expand_dims(gl.load(bias + columns, mask=there, other=0.0).to(gl.float32), SIDE)


@gluon.jit
def _multiply_tiles(
    bias,
    order,
    experts,
    used,
    out_tiles,
    out,
    ring,
    up_ring,
    x_ring,
    out_tile,
    full,
    empty,
    P,
    K: gl.constexpr,
    OUTPUTS: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiply the steps that are loaded, and write the results of each tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M if SWAPPED else N, 16])
    # OUT is the layout in which results are written. Their columns are not in dimension SIDE.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [32, 1], [1, 8], [0, 1]) if SWAPPED else MMA
    SIDE: gl.constexpr = 1 if SWAPPED else 0
    PARTS: gl.constexpr = (OUTPUTS + N - 1) // N
    dtype: gl.constexpr = ring.dtype
    rows = gl.arange(0, M, layout=gl.SliceLayout(1 - SIDE, OUT))
    columns = gl.arange(0, N, layout=gl.SliceLayout(SIDE, OUT))
    biased = gl.arange(0, N, layout=gl.SliceLayout(SIDE, MMA))
    total = gl.load(used) * PARTS
    count = 0
    for place in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = place // PARTS
        column = place % PARTS * N
        acc = gl.zeros([N, M] if SWAPPED else [M, N], gl.float32, MMA)
        acc_up = acc
        for at in range(0, K, STEP):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES & 1)
            value = x_ring.index(slot)
            if GATED:
                # Threads copied the inputs; the tensor cores read them another way.
                fence_async_shared()
            acc = _asked(ring.index(slot), value, acc, SWAPPED)
            if GATED:
                acc_up = _asked(up_ring.index(slot), value, acc_up, SWAPPED)
                acc, acc_up = warpgroup_mma_wait(2, deps=[acc, acc_up])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            # Both groups of warps are done with the step before.
            _barrier()
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=at > 0)
            count += 1
        if GATED:
            acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        expert = gl.load(experts + tile).to(gl.int64)
        if bias is not None:
            ROWS: gl.constexpr = OUTPUTS * (2 if GATED else 1)
            own = bias + expert * ROWS + column
            known = column + biased < OUTPUTS
            acc += _biases(own, biased, known, SIDE)
            if GATED:
                acc_up += _biases(own + OUTPUTS, biased, known, SIDE)
        if GATED:
            activated = gated(acc, acc_up, dtype, GELU, ALPHA, LIMIT).to(dtype)
            tma.store_wait(0)
            _barrier()
            if SWAPPED:
                out_tile.permute([1, 0]).store(activated)
            else:
                out_tile.store(activated)
            fence_async_shared()
            _barrier()
            _bulk_store(out_tiles, [tile * M, column], out_tile)
        else:
            result = gl.convert_layout(acc.to(dtype), OUT)
            pairs = gl.load(order + tile * M + rows)
            target = gl.expand_dims(out + pairs.to(gl.int64) * OUTPUTS, 1 - SIDE)
            there = gl.expand_dims(pairs < P, 1 - SIDE)
            inside = there & gl.expand_dims(column + columns < OUTPUTS, SIDE)
            gl.store(target + gl.expand_dims(column + columns, SIDE), result, mask=inside)
    if GATED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["P"])
def _large(
    x,
    x_tiles,
    w_tiles,
    bias,
    order,
    experts,
    used,
    out_tiles,
    out,
    P,
    K: gl.constexpr,
    OUTPUTS: gl.constexpr,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Write the inner values of all tiles' pairs in their order, or the results by pair."""
    dtype: gl.constexpr = w_tiles.dtype
    ring = gl.allocate_shared_memory(dtype, [STAGES, N, STEP], w_tiles.layout)
    up_ring = ring
    X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, STEP], dtype)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, M, STEP], X)
    out_tile = x_ring.index(0)
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, N, STEP], w_tiles.layout)
        out_tile = gl.allocate_shared_memory(dtype, [M, N], out_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # Each thread that copies inputs arrives by itself.
        mbarrier.init(full.index(slot), count=129 if GATED else 1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    _barrier()
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (
                    bias, order, experts, used, out_tiles, out, ring, up_ring, x_ring, out_tile,
                    full, empty, P, K, OUTPUTS, M, N, STEP, STAGES,
                    SWAPPED, GATED, GELU, ALPHA, LIMIT,
                ),
            ),
            (
                _load_tiles,
                (
                    x, x_tiles, w_tiles, order, experts, used, ring, up_ring, x_ring,
                    full, empty, P, K, OUTPUTS, CHOSEN, M, N, STEP, STAGES, GATED,
                ),
            ),
        ],
        [4],
        [64],
    )  # fmt: skip


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return tiles of a matrix, or of a stack of matrices one below the other."""
    flat = matrix.view(-1, matrix.shape[-1])
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], layout)


def multiply_large(
    x: Tensor,
    chosen: int,
    pairs: SortedPairs,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: tuple[bool, float | None, float | None],
    c: LargeConfig,
) -> Tensor:
    """Return the results of all pairs, [T * k, D]. activation: `gelu`, alpha and limit of a clamp.

    pairs: in tiles of as many as the configuration says.
    """
    (rows, width), inner_width = x.shape, gate_up.num_rows // 2
    tiles, m, kind = len(pairs.experts), c.pairs, pdl(x)
    inner = x.new_empty(tiles * m, inner_width)
    results = x.new_empty(rows * chosen, width)
    step = c.step
    inner_tiles = _tiles(inner, m, step)

    def launch(
        w: ExpertMatrix, out: TensorDescriptor, k: int, outputs: int, n: int, *, is_gated: bool
    ) -> None:
        programs = min(tiles * triton.cdiv(outputs, n), num_processors(x.device))
        _large[(programs,)](
            x,
            inner_tiles,
            _tiles(w.values, n, step),
            w.bias,
            *pairs,
            out,
            results,
            rows * chosen,
            k,
            outputs,
            chosen,
            m,
            n,
            step,
            c.stages,
            c.swapped,
            is_gated,
            *activation,
            num_warps=8,
            **kind,
        )

    launch(gate_up, _tiles(inner, m, c.columns), width, inner_width, c.columns, is_gated=True)
    launch(down, inner_tiles, inner_width, width, 2 * c.columns, is_gated=False)
    return results
