"""x W^T for up to 64 rows of x, where W is in 8 or 4 bits and reading it is most of the work.

The kernel is for Hopper. It is that of streamed_linear_gluon.py, but for what lies between the ring
and the tensor cores: each thread reads words of codes from shared memory, decodes them in its
registers, in the order in which the tensor cores take their first operand, and multiplies from
there. While the tensor cores work on one tile, the threads decode the next.

Scales of whole rows are applied at the end. Scales of groups of columns, which are at least a tile
wide, are applied to each tile's product.
"""

from __future__ import annotations

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

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import opens_early
from sidestep.kernels.products.partial_sums import MOST_PARTIALS, MOST_TILES, workspace_of
from sidestep.kernels.products.streamed_config import StreamedConfig, padded
from sidestep.kernels.products.streamed_linear_gluon import (
    _barrier,
    _bulk_load,
    _sum_of,
    _tiles,
    scale_of,
    tree_layout,
)
from sidestep.kernels.quantized.decoding_gluon import decoded, words_layout
from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.triton.silu_mul_triton import gated_silu

# Triton 3.9 has this by another name than 3.6.
_memory = gl.shared_memory_descriptor
_reinterpreted = getattr(
    _memory, "reinterpret" if hasattr(_memory, "reinterpret") else "_reinterpret"
)


@gluon.constexpr_function
def _results_layout(outputs: int, rows: int, warps: int) -> gl.DistributedLinearLayout:
    """Return the layout of results [outputs, rows]: a row's outputs are added as by tree_sum."""
    tree = tree_layout(rows, outputs, warps)
    bases = tree.reg_bases, tree.lane_bases, tree.warp_bases
    flipped = [[[b, a] for a, b in one] for one in bases]
    return gl.DistributedLinearLayout(*flipped, [], [outputs, rows])


@gluon.jit
def _ask_for_codes(
    word_tiles,
    ring,
    up_ring,
    bars,
    row,
    up_row,
    step,
    slot,
    pred,
    BYTES: gl.constexpr,
    WORDS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load a tile of codes, and announce the bytes of the tile of x that comes with it."""
    mbarrier.expect(bars.index(slot), BYTES, pred=pred)
    _bulk_load(word_tiles, [row, step * WORDS], bars.index(slot), ring.index(slot), pred=pred)
    if GATED:
        _bulk_load(
            word_tiles, [up_row, step * WORDS], bars.index(slot), up_ring.index(slot), pred=pred
        )


@gluon.jit
def _keep_scales(
    scales,
    table,
    row,
    end,
    first,
    total_groups,
    per_group,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STEPS: gl.constexpr,
    FLAT: gl.constexpr,
    layout: gl.constexpr,
):
    """Copy the scales of a program's tiles to shared memory, [STEPS, BN].

    To load them when a tile is decoded would cost the memory's whole latency at each step.

    row, end: the first row of W of the program, and the end of all rows.
    """
    place = gl.arange(0, STEPS * BN, layout=layout)
    group = gl.minimum((first + place // BN) * BK // GROUP, total_groups - 1)
    rows = gl.minimum(row + place % BN, end - 1) // HEIGHT
    flat = _reinterpreted(table, gl.float32, [STEPS * BN], FLAT)
    flat.store(gl.load(scales + group * per_group + rows))


@gluon.jit
def _number(scale, ZEROS: gl.constexpr):
    """Return a scale without the zero in its lowest bits."""
    if ZEROS:
        scale = without_zero(scale)
    return scale


@gluon.jit
def _halves(words, SIXTEEN: gl.constexpr):
    """Return the two pieces of each row of words [M, 32], in the layout SIXTEEN."""
    pieces = words.reshape(words.shape[0], 2, 16).permute(0, 2, 1)
    first, second = pieces.split()
    return gl.convert_layout(first, SIXTEEN), gl.convert_layout(second, SIXTEEN)


@gluon.jit
def _first_operand(
    words,
    scale,
    KIND: gl.constexpr,
    ZEROS: gl.constexpr,
    dtype: gl.constexpr,
    COLUMNS: gl.constexpr,
    SIXTEEN: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Return the numbers of a piece of words, as the tensor cores' first operand.

    scale: of the rows, with their zeros.
    """
    zero = None
    if ZEROS:
        zero = gl.convert_layout(zero_of(scale), gl.SliceLayout(1, SIXTEEN))
    v = decoded(words, zero, None, KIND, dtype, words.shape[0], COLUMNS)
    return gl.convert_layout(v, FIRST)


@opens_early
@gluon.jit(do_not_specialize=["T"])
def _streamed_codes(
    x_tiles,
    word_tiles,
    scales,
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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    ZEROS: gl.constexpr,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    WORDS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    STEPS: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    NEXT: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    HALVES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = BN * HALVES * WORDS * 4 + ROWS * BK * 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WIDE: gl.constexpr = _results_layout(BN, ROWS, num_warps)
    CODES: gl.constexpr = words_layout(BN, num_warps, WORDS)
    SIXTEEN: gl.constexpr = words_layout(BN, num_warps, WORDS // 2)
    PIECE: gl.constexpr = BK // 2
    GROUPED: gl.constexpr = GROUP != 0
    TABLES: gl.constexpr = BK // 128
    OWN: gl.constexpr = gl.SliceLayout(1, MMA)
    TABLE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.program_id(0) // SPLIT
    part = gl.program_id(0) % SPLIT
    row = tile * BN
    each = gl.cdiv(gl.cdiv(K, BK), SPLIT)
    first = part * each
    steps = gl.minimum(gl.cdiv(K, BK) - first, each)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN, WORDS], word_tiles.layout)
    up_ring = ring
    if GATED:
        up_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN, WORDS], word_tiles.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BK], x_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    # 1. Load the first tiles of W, then those of x, which another kernel may still be writing.
    for slot in gl.static_range(STAGES):
        _ask_for_codes(
            word_tiles, ring, up_ring, bars, row, N + row, first + slot, slot, slot < steps,
            BYTES, WORDS, GATED,
        )  # fmt: skip
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, WIDE))
    inside = (n < N)[:, None] & (t < T)[None, :]
    if NEXT:
        weights = gl.load(next_norm + n, mask=n < N, other=0.0).to(gl.float32)
    total = N * HALVES
    per_group = gl.cdiv(total, HEIGHT)
    if GROUPED:
        groups = gl.cdiv(K, GROUP)
        table = gl.allocate_shared_memory(gl.float32, [STEPS, BN], FLAT)
        up_table = table
        _keep_scales(
            scales, table, row, N, first * TABLES, groups, per_group,
            GROUP, HEIGHT, BN, BK // TABLES, STEPS, FLAT, TABLE,
        )  # fmt: skip
        if GATED:
            up_table = gl.allocate_shared_memory(gl.float32, [STEPS, BN], FLAT)
            _keep_scales(
                scales, up_table, N + row, 2 * N, first * TABLES, groups, per_group,
                GROUP, HEIGHT, BN, BK // TABLES, STEPS, FLAT, TABLE,
            )  # fmt: skip
        _barrier()
        scale = table.index(0).load(OWN)
    else:
        table, up_table = ring, ring
        own_row = gl.minimum(row + gl.arange(0, BN, layout=OWN), N - 1)
        scale = gl.load(scales + own_row // HEIGHT)
    up_scale = scale
    if GATED and not GROUPED:
        up_scale = gl.load(scales + (own_row + N) // HEIGHT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for slot in gl.static_range(STAGES):
        _bulk_load(
            x_tiles, [0, (first + slot) * BK], bars.index(slot), x_ring.index(slot),
            pred=slot < steps,
        )  # fmt: skip
    # This work is done while the tiles are loading. Many rows would take too many registers.
    EARLY: gl.constexpr = ADD and ROWS < 64
    if EARLY:
        before = gl.load(
            out + t[None, :].to(gl.int64) * out_stride + n[:, None], mask=inside, other=0.0
        )
    if PARTS:
        factor = gl.convert_layout(
            scale_of(squares, T, eps, K, ROWS, PARTS, num_warps), gl.SliceLayout(0, WIDE)
        )
    # 2. Multiply step by step. While the tensor cores work on a piece, the next one is decoded.
    acc = gl.zeros([BN, ROWS], gl.float32, MMA)
    acc_up = acc
    for step in range(steps):
        place = step % STAGES
        mbarrier.wait(bars.index(place), step // STAGES & 1)
        first_words, second_words = _halves(ring.index(place).load(CODES), SIXTEEN)
        value = x_ring.index(place)
        first_value = value.slice(0, PIECE, dim=1).permute([1, 0])
        second_value = value.slice(PIECE, PIECE, dim=1).permute([1, 0])
        second_scale = scale
        if GROUPED:
            scale = table.index(step * TABLES).load(OWN)
            second_scale = scale
            if TABLES == 2:
                second_scale = table.index(step * 2 + 1).load(OWN)
        w = _first_operand(first_words, scale, KIND, ZEROS, dtype, PIECE, SIXTEEN, FIRST)
        product = warpgroup_mma(w, first_value, acc, use_acc=not GROUPED, is_async=True)
        if GATED:
            first_words, up_words = _halves(up_ring.index(place).load(CODES), SIXTEEN)
            second_up_scale = up_scale
            if GROUPED:
                up_scale = up_table.index(step * TABLES).load(OWN)
                second_up_scale = up_scale
                if TABLES == 2:
                    second_up_scale = up_table.index(step * 2 + 1).load(OWN)
            up_w = _first_operand(first_words, up_scale, KIND, ZEROS, dtype, PIECE, SIXTEEN, FIRST)
            up_product = warpgroup_mma(
                up_w, first_value, acc_up, use_acc=not GROUPED, is_async=True
            )
            product, w = warpgroup_mma_wait(1, deps=[product, w])
        second_w = _first_operand(
            second_words, second_scale, KIND, ZEROS, dtype, PIECE, SIXTEEN, FIRST
        )
        CHAINED: gl.constexpr = TABLES == 1 or not GROUPED
        # Many rows leave too few registers for the products of both pieces at once.
        APART: gl.constexpr = ROWS >= 64 and not CHAINED
        if APART:
            product, w = warpgroup_mma_wait(0, deps=[product, w])
            acc += product * _number(scale, ZEROS)[:, None]
        second_product = warpgroup_mma(
            second_w, second_value, product if CHAINED else acc, use_acc=CHAINED, is_async=True
        )
        if GATED:
            up_product, up_w = warpgroup_mma_wait(1, deps=[up_product, up_w])
            second_up_w = _first_operand(
                up_words, second_up_scale, KIND, ZEROS, dtype, PIECE, SIXTEEN, FIRST
            )
            second_up_product = warpgroup_mma(
                second_up_w, second_value, up_product if CHAINED else acc_up,
                use_acc=CHAINED, is_async=True,
            )  # fmt: skip
            second_product, second_up_product, second_w, second_up_w = warpgroup_mma_wait(
                0, deps=[second_product, second_up_product, second_w, second_up_w]
            )
        elif APART:
            second_product, second_w = warpgroup_mma_wait(0, deps=[second_product, second_w])
        elif CHAINED:
            second_product, w, second_w = warpgroup_mma_wait(0, deps=[second_product, w, second_w])
        else:
            product, second_product, w, second_w = warpgroup_mma_wait(
                0, deps=[product, second_product, w, second_w]
            )
        if GROUPED:
            if TABLES == 2 and not APART:
                acc += product * _number(scale, ZEROS)[:, None]
            acc += second_product * _number(second_scale, ZEROS)[:, None]
            if GATED:
                if TABLES == 2:
                    acc_up += up_product * _number(up_scale, ZEROS)[:, None]
                acc_up += second_up_product * _number(second_up_scale, ZEROS)[:, None]
        else:
            acc = second_product
            if GATED:
                acc_up = second_up_product
        # All threads are done with this tile.
        _barrier()
        ahead = step + STAGES
        more = ahead < steps
        _ask_for_codes(
            word_tiles, ring, up_ring, bars, row, N + row, first + ahead, place, more,
            BYTES, WORDS, GATED,
        )  # fmt: skip
        _bulk_load(
            x_tiles, [0, (first + ahead) * BK], bars.index(place), x_ring.index(place), pred=more
        )
    if not GROUPED:
        acc *= _number(scale, ZEROS)[:, None]
        if GATED:
            acc_up *= _number(up_scale, ZEROS)[:, None]
    # 3. Add the parts of a tile's programs.
    result = gl.convert_layout(acc, WIDE)
    up = result
    if GATED:
        up = gl.convert_layout(acc_up, WIDE)
    last = True
    if SPLIT > 1:
        HALF: gl.constexpr = SPLIT * BN * ROWS
        parts_of_tile = (
            partials + tile.to(gl.int64) * (HALVES * HALF) + t[None, :] * BN + (n - row)[:, None]
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
            result *= factor[None, :]
        if BIAS:
            result += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if PARTS:
                up *= factor[None, :]
            if BIAS:
                up += gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            result = gated_silu(result, up, dtype)
        places = out + t[None, :].to(gl.int64) * out_stride + n[:, None]
        if ADD:
            if not EARLY:
                before = gl.load(places, mask=inside, other=0.0)
            result += before.to(gl.float32)
        rounded = result.to(dtype)
        gl.store(places, rounded, mask=inside)
        if NEXT:
            wide = rounded.to(gl.float32)
            gl.store(
                next_weighted + t[None, :] * N + n[:, None],
                (wide * weights[:, None]).to(dtype),
                mask=inside,
            )
            parts = gl.sum(gl.where(inside, wide * wide, 0.0), 0)
            gl.store(next_squares + t * (gl.num_programs(0) // SPLIT) + tile, parts, mask=t < T)


def launch(
    x: Tensor,
    matrix: DeviceMatrix,
    tensors: tuple[Tensor, ...],
    eps: float,
    flags: tuple[int, bool, bool, bool, bool],
    c: StreamedConfig,
) -> None:
    """Launch the kernel, with arguments as of kernels.products.skinny_linear_triton.launch."""
    bias, squares, next_norm, out, weighted, sums = tensors
    (tokens, num_outputs), num_inputs = out.shape, matrix.shape[1]
    rows, gated = padded(tokens), flags[-1]
    tiles, words = cdiv(num_outputs, c.block_n), c.block_k // matrix.in_word
    assert words == 32 and c.block_n in (64, 128)
    if c.split > 1:
        sums_left = tiles * c.split * c.block_n * rows * (1 + gated)
        assert tiles <= MOST_TILES and sums_left <= MOST_PARTIALS, f"{c}"
    workspace = workspace_of(x.device)
    height, width = matrix.group
    layout = gl.NVMMASharedLayout.get_default_for([c.block_n, words], gl.int32)
    codes = matrix.words
    word_tiles = TensorDescriptor(
        codes, list(codes.shape), [codes.stride(0), 1], [c.block_n, words], layout
    )
    _streamed_codes[(tiles * c.split,)](
        _tiles(x, rows, c.block_k),
        word_tiles,
        matrix.scales,
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
        matrix.kind,
        width,
        height,
        matrix.zeros,
        rows,
        c.block_n,
        c.block_k,
        words,
        c.stages,
        c.split,
        next_power_of_2(cdiv(cdiv(num_inputs, c.block_k), c.split) * (c.block_k // STEP)),
        *flags,
        num_warps=c.block_n // 16,
        # Two programs of eight warps share a processor.
        **({"maxnreg": 128} if c.block_n > 64 else {}),
        **pdl(x),
    )
