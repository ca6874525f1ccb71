"""x W^T for a few up to 64 rows of x, where reading W is most of the work.

W streams through shared memory. The kernel is for Hopper. Each program takes some rows of W, or a
part of their columns, through a ring of tiles that the bulk copy engine fills. No tile passes
through registers on the way, so a ring is as deep as shared memory allows. The product is computed
as W x^T, since tensor cores need 64 rows of their first operand but only 8 columns of the second.

It is written in Gluon, Triton's lower level, for one thing that Triton cannot express. W's first
tiles are loading before the kernel waits for x (programmatic dependent launch), while the kernel
before still runs.

Where there are fewer tiles than processors, several programs share one, each with a part of K. They
leave their parts in float32, and the last program to arrive adds them up, always in the same order:
the result is the same in every run.

kernels/products/own_linear.py lists the kernel's other features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import opens_early
from sidestep.kernels.products.partial_sums import MOST_PARTIALS, workspace_of
from sidestep.kernels.products.streamed_config import (
    ALIGNED,
    MAX_ROWS,
    StreamedConfig,
    padded,
)
from sidestep.kernels.triton.silu_mul_triton import gated_silu

# Triton 3.9 has these by other names than 3.6.
_bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _ask_for_w(
    w_tiles,
    ring,
    up_ring,
    bars,
    row,
    up_row,
    step,
    slot,
    pred,
    BYTES: gl.constexpr,
    BK: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load a tile of W, and announce the bytes of the tile of x that comes with it."""
    mbarrier.expect(bars.index(slot), BYTES, pred=pred)
    _bulk_load(w_tiles, [row, step * BK], bars.index(slot), ring.index(slot), pred=pred)
    if GATED:
        _bulk_load(w_tiles, [up_row, step * BK], bars.index(slot), up_ring.index(slot), pred=pred)


@gluon.constexpr_function
def tree_layout(rows: int, parts: int, warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of [rows, parts] in which tree_sum adds neighbours first.

    A thread has the lowest bits of a part's number. Lanes have the others, in reverse: a sum over
    lanes begins with those that are farthest apart.
    """
    alone = max(0, parts.bit_length() - 6)
    over_lanes = parts.bit_length() - 1 - alone
    own = [[0, 1 << i] for i in range(alone)]
    lanes = [[0, 1 << (alone + over_lanes - 1 - i)] for i in range(over_lanes)]
    lanes += [[0, 0]] * (5 - over_lanes)
    of_rows = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    of_warps = warps.bit_length() - 1
    turns = of_rows[:of_warps] + [[0, 0]] * (of_warps - len(of_rows))
    return gl.DistributedLinearLayout(own + of_rows[of_warps:], lanes, turns, [], [rows, parts])


@gluon.jit
def tree_sum(v):
    """Return the sums of the rows of v, whose layout is a tree_layout: neighbours are added first.

    So sums of parts that are themselves sums of 16, 32 or 64 numbers have the same bits.
    """
    ROWS: gl.constexpr = v.shape[0]
    ALONE: gl.constexpr = max(0, v.shape[1].bit_length() - 6)
    for _ in gl.static_range(ALONE):
        a, b = v.reshape(ROWS, v.shape[1] // 2, 2).split()
        v = a + b
    return gl.sum(v, 1)


@gluon.jit
def scale_of(squares, T, eps, K, ROWS: gl.constexpr, PARTS: gl.constexpr, num_warps: gl.constexpr):
    """Return the norm's factor for these rows of a stream, from parts of the sums of squares."""
    WIDTH: gl.constexpr = triton.next_power_of_2(PARTS)
    layout: gl.constexpr = tree_layout(ROWS, WIDTH, num_warps)
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    part = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    given = gl.load(
        squares + gl.minimum(token, T - 1)[:, None] * PARTS + part[None, :],
        mask=(part < PARTS)[None, :],
        other=0.0,
    )
    return gl.rsqrt(tree_sum(given) / K + eps)


@gluon.jit
def _sum_of(parts, NUMBER: gl.constexpr, SIZE: gl.constexpr):
    """Return the sum of the parts in order, read past the L1 cache, which may hold stale values."""
    total = gl.load(parts, cache_modifier=".cg")
    for part in gl.static_range(1, NUMBER):
        total += gl.load(parts + part * SIZE, cache_modifier=".cg")
    return total


@opens_early
@gluon.jit(do_not_specialize=["T"])
def _streamed(
    x_tiles,
    w_tiles,
    bias,
    squares,
    next_norm,
    out,
    next_weighted,
    next_squares,
    partials,
    counters,
    T,
    N,
    K,
    eps,
    out_stride,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    NEXT: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    BYTES: gl.constexpr = (BN * (2 if GATED else 1) + ROWS) * BK * 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, num_warps], [0, 1])
    tile = gl.program_id(0) // SPLIT
    part = gl.program_id(0) % SPLIT
    row = tile * BN
    each = gl.cdiv(gl.cdiv(K, BK), SPLIT)
    first = part * each
    steps = gl.minimum(gl.cdiv(K, BK) - first, each)
    ring = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], w_tiles.layout)
    up_ring = ring
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BK], x_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    # 1. Load the first tiles of W, then those of x, which another kernel may still be writing.
    for slot in gl.static_range(STAGES):
        _ask_for_w(
            w_tiles,
            ring,
            up_ring,
            bars,
            row,
            N + row,
            first + slot,
            slot,
            slot < steps,
            BYTES,
            BK,
            GATED,
        )
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, WIDE))
    inside = (n < N)[:, None] & (t < T)[None, :]
    places = out + t[None, :].to(gl.int64) * out_stride + n[:, None]
    if NEXT:
        scales = gl.load(next_norm + n, mask=n < N, other=0.0).to(gl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        _bulk_load(
            x_tiles,
            [0, (first + slot) * BK],
            bars.index(slot),
            x_ring.index(slot),
            pred=slot < steps,
        )
    # This work is done while the tiles are loading.
    if ADD:
        before = gl.load(places, mask=inside, other=0.0)
    if PARTS:
        scale = gl.convert_layout(
            scale_of(squares, T, eps, K, ROWS, PARTS, num_warps), gl.SliceLayout(0, WIDE)
        )
    # 2. Multiply step by step; a tile's slot is loaded again once the product after it has begun.
    acc = gl.zeros([BN, ROWS], gl.float32, MMA)
    acc_up = acc
    for step in range(steps):
        place = step % STAGES
        mbarrier.wait(bars.index(place), step // STAGES & 1)
        value = x_ring.index(place).permute([1, 0])
        acc = warpgroup_mma(ring.index(place), value, acc, is_async=True)
        if GATED:
            acc_up = warpgroup_mma(up_ring.index(place), value, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(2, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        after = step + STAGES - 1
        more = (step > 0) & (after < steps)
        used = after % STAGES
        _ask_for_w(
            w_tiles, ring, up_ring, bars, row, N + row, first + after, used, more, BYTES, BK, GATED
        )
        _bulk_load(
            x_tiles, [0, (first + after) * BK], bars.index(used), x_ring.index(used), pred=more
        )
    if GATED:
        acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    # 3. Add the parts of a tile's programs.
    result = gl.convert_layout(acc, WIDE)
    up = result
    if GATED:
        up = gl.convert_layout(acc_up, WIDE)
    last = True
    if SPLIT > 1:
        HALF: gl.constexpr = SPLIT * BN * ROWS
        parts_of_tile = (
            partials
            + tile.to(gl.int64) * (2 * HALF if GATED else HALF)
            + t[None, :] * BN
            + (n - row)[:, None]
        )
        gl.store(parts_of_tile + part * BN * ROWS, result)
        if GATED:
            gl.store(parts_of_tile + HALF + part * BN * ROWS, up)
        _barrier()
        last = gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            gl.store(counters + tile, 0)
            result = _sum_of(parts_of_tile, SPLIT, BN * ROWS)
            if GATED:
                up = _sum_of(parts_of_tile + HALF, SPLIT, BN * ROWS)
    # 4. Scale, add and activate the result, and store it.
    if last:
        if PARTS:
            result *= scale[None, :]
        if BIAS:
            result += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if PARTS:
                up *= scale[None, :]
            result = gated_silu(result, up, dtype)
        if ADD:
            result += before.to(gl.float32)
        rounded = result.to(dtype)
        gl.store(places, rounded, mask=inside)
        if NEXT:
            wide = rounded.to(gl.float32)
            gl.store(
                next_weighted + t[None, :] * N + n[:, None],
                (wide * scales[:, None]).to(dtype),
                mask=inside,
            )
            parts = gl.sum(gl.where(inside, wide * wide, 0.0), 0)
            gl.store(next_squares + t * (gl.num_programs(0) // SPLIT) + tile, parts, mask=t < T)


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(
        matrix,
        list(matrix.shape),
        [matrix.stride(0), 1],
        [rows, columns],
        gl.NVMMASharedLayout.get_default_for([rows, columns], dtype),
    )


def launch(
    x: Tensor,
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    eps: float,
    flags: tuple[int, bool, bool, bool, bool],
    c: StreamedConfig,
) -> None:
    """Launch the kernel, with arguments as of kernels.products.skinny_linear_triton.launch."""
    bias, squares, next_norm, out, weighted, sums = tensors
    (tokens, num_outputs), num_inputs = out.shape, weight.shape[1]
    rows, gated = padded(tokens), flags[-1]
    tiles = cdiv(num_outputs, c.block_n)
    assert rows <= MAX_ROWS and num_inputs % ALIGNED == 0, (
        f"{tuple(x.shape)} by {tuple(weight.shape)}"
    )
    assert c.split == 1 or tiles * c.split * c.block_n * rows * (1 + gated) <= MOST_PARTIALS, f"{c}"
    workspace = workspace_of(x.device)
    _streamed[(tiles * c.split,)](
        _tiles(x, rows, c.block_k),
        _tiles(weight, c.block_n, c.block_k),
        bias,
        squares,
        next_norm,
        out,
        weighted,
        sums,
        workspace.partials,
        workspace.counters,
        tokens,
        num_outputs,
        num_inputs,
        eps,
        out.stride(0),
        rows,
        c.block_n,
        c.block_k,
        c.stages,
        c.split,
        *flags,
        num_warps=4,
        **pdl(x),
    )
