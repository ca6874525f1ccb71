"""x W^T where both are in e4m3 with a scale a row, for 65 up to some hundred rows of x.

The kernel is for Hopper, and computes W x^T. Both operands come through a ring of tiles in shared
memory, which the bulk copy engine fills, and the tensor cores read them from there. Hopper's tensor
cores keep about 14 bits of a sum of such products, so each four steps of 128 columns have a sum of
their own, which is added in float32. Meanwhile the tensor cores work for the other warps, or on the
next step.

For so few rows there are fewer tiles than processors, or little more. Several programs share a tile
where there are too few. A tile may have two pieces of rows of x, so that 192 rows are not computed
as 256.
"""

from __future__ import annotations

import math

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.ops.rms_norm import QuantizedRows
from sidestep.kernels.products.partial_sums import MOST_PARTIALS, MOST_TILES, workspace_of
from sidestep.kernels.products.scaled_config import ScaledConfig
from sidestep.kernels.products.streamed_linear_gluon import _barrier, _bulk_load, _sum_of
from sidestep.kernels.products.wide_codes_gluon import _ask_for_x, _finish
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

_SUMMED = 4
"""Steps whose sum stays in the tensor cores."""


@gluon.jit
def _begin(ring, x_ring, slot, total, GOES_ON: gl.constexpr):
    """Begin the product of a step, which is added to `total` if that goes on."""
    return warpgroup_mma(
        ring.index(slot), x_ring.index(slot).permute([1, 0]), total, use_acc=GOES_ON, is_async=True
    )


@gluon.jit
def _refill(
    x_tiles, more_tiles, w_tiles, ring, x_ring, more_ring, bars, row, token, first, step, steps,
    ROWS: gl.constexpr, MORE: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Load a later tile in the place of a step's, when all threads are done with that."""
    _barrier()
    later, slot = step + STAGES, step % STAGES
    load = later < steps
    mbarrier.expect(bars.index(slot), BYTES, pred=load)
    _bulk_load(w_tiles, [row, (first + later) * BK], bars.index(slot), ring.index(slot), pred=load)
    _ask_for_x(
        x_tiles, more_tiles, x_ring, more_ring, bars.index(slot), token, (first + later) * BK,
        slot, load, ROWS, MORE,
    )  # fmt: skip


@gluon.jit
def _store(
    acc, own, part, row, token, row_scales, scales, bias, out, T, N, out_stride,
    HEIGHT: gl.constexpr, SPLIT: gl.constexpr, LEAVE: gl.constexpr,
    BIAS: gl.constexpr, ADD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Finish the sums of a tile, or leave them for the programs that share it."""
    BN: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, num_warps], [0, 1])
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, WIDE))
    result = gl.convert_layout(acc, WIDE)
    if SPLIT == 1 or LEAVE:
        scale = gl.load(scales + gl.minimum(n, N - 1) // HEIGHT)
        row_scale = gl.load(row_scales + gl.minimum(token + t, T - 1))
        result *= row_scale[None, :] * scale[:, None]
        if LEAVE:
            out += part.to(gl.int64) * T * out_stride
        _finish(result, n, token, bias, out, T, N, out_stride, BIAS, ADD)
    else:
        gl.store(own + part * (BN * ROWS) + t[None, :] * BN + (n - row)[:, None], result)


@gluon.jit
def _finish_part(
    own, part, row, token,
    row_scales, scales, bias, out, T, N, out_stride,
    BN: gl.constexpr, ROWS: gl.constexpr,
    HEIGHT: gl.constexpr, SPLIT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Add the parts of a tile's programs, for this program's share of the rows of x."""
    FEW: gl.constexpr = 16
    WIDE: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, num_warps], [0, 1])
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    few = gl.arange(0, FEW, layout=gl.SliceLayout(0, WIDE))
    scale = gl.load(scales + gl.minimum(n, N - 1) // HEIGHT)
    for turn in range(part, ROWS // FEW, SPLIT):
        source = own + (turn * FEW + few)[None, :] * BN + (n - row)[:, None]
        result = _sum_of(source, SPLIT, BN * ROWS)
        row_scale = gl.load(row_scales + gl.minimum(token + turn * FEW + few, T - 1))
        result *= row_scale[None, :] * scale[:, None]
        _finish(result, n, token + turn * FEW, bias, out, T, N, out_stride, BIAS, ADD)


@gluon.jit(do_not_specialize=["T", "row_tiles"])
def _wide_scaled(
    x_tiles,
    more_tiles,
    w_tiles,
    row_scales,
    scales,
    bias,
    out,
    partials,
    counters,
    T,
    N,
    K,
    row_tiles,
    out_stride,
    HEIGHT: gl.constexpr,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    UNROLL: gl.constexpr,
    DEPTH: gl.constexpr,
    LEAVE: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    ALL: gl.constexpr = ROWS + MORE
    BYTES: gl.constexpr = (BN + ALL) * BK
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 32])
    OTHER: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [num_warps, 1], [16, MORE if MORE else 8, 32]
    )
    kind: gl.constexpr = w_tiles.dtype
    # 1. Find the tile, and load its first parts. W comes first: another kernel may still write x.
    part = gl.program_id(0) % SPLIT
    place = gl.program_id(0) // SPLIT
    row = place // row_tiles * BN
    token = place % row_tiles * ALL
    each = gl.cdiv(K // BK, SPLIT)
    first = part * each
    steps = gl.minimum(K // BK - first, each)
    ring = gl.allocate_shared_memory(kind, [STAGES, BN, BK], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(kind, [STAGES, ROWS, BK], x_tiles.layout)
    more_ring = x_ring
    if MORE:
        more_ring = gl.allocate_shared_memory(kind, [STAGES, MORE, BK], more_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.expect(bars.index(slot), BYTES, pred=slot < steps)
        _bulk_load(
            w_tiles, [row, (first + slot) * BK], bars.index(slot), ring.index(slot),
            pred=slot < steps,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        _ask_for_x(
            x_tiles, more_tiles, x_ring, more_ring, bars.index(slot), token, (first + slot) * BK,
            slot, slot < steps, ROWS, MORE,
        )  # fmt: skip
    # 2. Multiply. A step's product is added while the tensor cores work on another one.
    nothing = gl.zeros([BN, ROWS], gl.float32, MMA)
    acc = nothing
    no_more = gl.zeros([BN, MORE if MORE else 8], gl.float32, OTHER)
    acc_more = no_more
    for turn in range(steps // UNROLL):
        # Two sums take turns, so that the tensor cores have the next product while one is added.
        product, other = nothing, nothing
        if MORE:
            other = no_more
        for i in gl.static_range(UNROLL):
            step = turn * UNROLL + i
            at = step % STAGES
            mbarrier.wait(bars.index(at), step // STAGES & 1)
            if MORE or i // DEPTH % 2 == 0:
                product = _begin(ring, x_ring, at, product, i % DEPTH > 0)
            else:
                other = _begin(ring, x_ring, at, other, i % DEPTH > 0)
            if i > 0:
                product, other = warpgroup_mma_wait(1, deps=[product, other])
                if i % DEPTH == 0:
                    if MORE:
                        acc_more += other
                    elif i // DEPTH % 2 == 0:
                        acc += other
                    else:
                        acc += product
                # All threads are done with the step before.
                _refill(
                    x_tiles, more_tiles, w_tiles, ring, x_ring, more_ring, bars, row, token,
                    first, step - 1, steps, ROWS, MORE, BK, STAGES, BYTES,
                )  # fmt: skip
            if MORE:
                other = _begin(ring, more_ring, at, other, i % DEPTH > 0)
                if i % DEPTH == DEPTH - 1:
                    product, other = warpgroup_mma_wait(1, deps=[product, other])
                    acc += product
        product, other = warpgroup_mma_wait(0, deps=[product, other])
        if MORE:
            acc_more += other
        elif (UNROLL // DEPTH) % 2 == 0:
            acc += other
        else:
            acc += product
        _refill(
            x_tiles, more_tiles, w_tiles, ring, x_ring, more_ring, bars, row, token, first,
            turn * UNROLL + UNROLL - 1, steps, ROWS, MORE, BK, STAGES, BYTES,
        )  # fmt: skip
    # 3. Store the sums, or add the parts of a tile's programs.
    own = partials + place.to(tl.int64) * (SPLIT * BN * ALL)
    own_more = own + SPLIT * BN * ROWS
    _store(
        acc, own, part, row, token, row_scales, scales, bias, out, T, N, out_stride,
        HEIGHT, SPLIT, LEAVE, BIAS, ADD, num_warps,
    )  # fmt: skip
    if MORE:
        _store(
            acc_more, own_more, part, row, token + ROWS, row_scales, scales, bias, out, T, N,
            out_stride, HEIGHT, SPLIT, LEAVE, BIAS, ADD, num_warps,
        )  # fmt: skip
    if SPLIT > 1 and not LEAVE:
        _barrier()
        # A tile's programs start one after the other, and wait for nothing else. So all arrive.
        arrived = gl.atomic_add(counters + place, 1, sem="acq_rel") + 1
        while arrived < SPLIT:
            arrived = gl.atomic_add(counters + place, 0, sem="acquire")
        _finish_part(
            own, part, row, token, row_scales, scales, bias, out, T, N, out_stride,
            BN, ROWS, HEIGHT, SPLIT, BIAS, ADD, num_warps,
        )  # fmt: skip
        if MORE:
            _finish_part(
                own_more, part, row, token + ROWS, row_scales, scales, bias, out, T, N, out_stride,
                BN, MORE, HEIGHT, SPLIT, BIAS, ADD, num_warps,
            )  # fmt: skip
        _barrier()
        if gl.atomic_add(counters + place, 1, sem="acq_rel") == 2 * SPLIT - 1:
            gl.store(counters + place, 0)


def _tiles(codes: Tensor, rows: int) -> TensorDescriptor:
    """Return tiles of codes, [rows, STEP]."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, STEP], gl.float8e4nv)
    return TensorDescriptor(codes, list(codes.shape), [codes.stride(0), 1], [rows, STEP], layout)


def launch(
    x: QuantizedRows,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor,
    add: bool,
    c: ScaledConfig,
) -> None:
    """Launch the kernel.

    out: [T, N], to which the product is added if `add`; or float32 [c.split, T, N], where each
    program of a tile leaves its part, for the next kernel to add.
    """
    (tokens, num_outputs), num_inputs = out.shape[-2:], x.codes.shape[1]
    leave = out.dim() == 3
    assert not leave or (len(out) == c.split and bias is None and not add)
    tiles = cdiv(num_outputs, c.block_n)
    row_tiles = cdiv(tokens, c.rows + c.more)
    if c.split > 1 and not leave:
        shared = tiles * row_tiles
        assert shared <= MOST_TILES, f"{c}"
        assert shared * c.split * c.block_n * (c.rows + c.more) <= MOST_PARTIALS, f"{c}"
    workspace = workspace_of(out.device)
    # No program may have a part of a turn, and no turn a part of a sum.
    steps, rest = divmod(num_inputs // STEP, c.split)
    unroll = 1 if rest else math.gcd(c.unroll, steps)
    depth = math.gcd(_SUMMED, unroll)
    _wide_scaled[(tiles * row_tiles * c.split,)](
        _tiles(x.codes, c.rows),
        _tiles(x.codes, c.more or c.rows),
        _tiles(matrix.words.view(x.codes.dtype), c.block_n),
        x.scales,
        matrix.scales,
        x.scales if bias is None else bias,
        out,
        workspace.partials,
        workspace.counters,
        tokens,
        num_outputs,
        num_inputs,
        row_tiles,
        out.stride(-2),
        matrix.group[0],
        c.rows,
        c.more,
        c.block_n,
        STEP,
        c.stages,
        c.split,
        unroll,
        depth,
        leave,
        bias is not None,
        add,
        num_warps=c.num_warps,
        **pdl(out),
    )
