"""x W^T for more than 64 rows of x, where W is in 8 or 4 bits and the tensor cores' speed counts.

The kernel is for Hopper, and computes W x^T. Codes and x come through a ring of tiles in shared
memory, which the bulk copy engine fills. A thread decodes the codes of half a tile in its
registers, from which the tensor cores read their first operand, while they work on the half before.
So a number is decoded once for as many rows of x as a tile has, and never goes through shared
memory.

Scales of groups of columns are multiplied with the numbers, and rounded to 16 bits. Scales of whole
rows are applied at the end.
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

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.products.partial_sums import MOST_PARTIALS, MOST_TILES, workspace_of
from sidestep.kernels.products.streamed_config import WideConfig
from sidestep.kernels.products.streamed_linear_gluon import _barrier, _bulk_load, _sum_of, _tiles
from sidestep.kernels.quantized.decoding_gluon import decoded, pairs_of, words_layout
from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix


@gluon.jit
def _ask(
    x_tiles,
    more_tiles,
    word_tiles,
    ring,
    x_ring,
    more_ring,
    bars,
    row,
    token,
    step,
    slot,
    pred,
    WORDS: gl.constexpr,
    STEP: gl.constexpr,
    BYTES: gl.constexpr,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
):
    """Load a tile of codes and one of x."""
    mbarrier.expect(bars.index(slot), BYTES, pred=pred)
    _bulk_load(word_tiles, [row, step * WORDS], bars.index(slot), ring.index(slot), pred=pred)
    _ask_for_x(
        x_tiles, more_tiles, x_ring, more_ring, bars.index(slot), token, step * STEP, slot, pred,
        ROWS, MORE,
    )  # fmt: skip


@gluon.jit
def _ask_for_x(
    x_tiles, more_tiles, ring, more_ring, bar, token, column, slot, pred,
    ROWS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Load a tile of x, in one or two pieces."""
    _bulk_load(x_tiles, [token, column], bar, ring.index(slot), pred=pred)
    if MORE:
        _bulk_load(more_tiles, [token + ROWS, column], bar, more_ring.index(slot), pred=pred)


@gluon.jit
def _halves(words, HALF: gl.constexpr):
    """Return the words of the first and of the second 64 columns of each row, in this layout."""
    WORDS: gl.constexpr = words.shape[1]
    if WORDS == 32:
        pieces = words.reshape(words.shape[0], 2, 16).permute(0, 2, 1)
    else:
        pieces = words.reshape(words.shape[0], 4, 2, 2).permute(0, 1, 3, 2)
    first, second = pieces.split()
    first = first.reshape(words.shape[0], WORDS // 2)
    second = second.reshape(words.shape[0], WORDS // 2)
    return gl.convert_layout(first, HALF), gl.convert_layout(second, HALF)


@gluon.jit
def _scales_of(scales, rows, step, groups, per_group, GROUP: gl.constexpr, STEP: gl.constexpr):
    """Return the scales of rows in a step. rows: places among a group's scales."""
    group = gl.minimum(step * STEP // GROUP, groups - 1)
    return gl.load(scales + group * per_group + rows)


@gluon.jit
def _finish(result, n, token, bias, out, T, N, out_stride, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Store sums of the rows of W n and of the rows of x from token on, or add them to out."""
    t = token + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, result.type.layout))
    inside = (n < N)[:, None] & (t < T)[None, :]
    places = out + t[None, :].to(gl.int64) * out_stride + n[:, None]
    if BIAS:
        result += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if ADD:
        result += gl.load(places, mask=inside, other=0.0).to(gl.float32)
    gl.store(places, result.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _store(
    result, own, part, row, token, bias, out, T, N, out_stride,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Finish the sums of a tile, or leave them for the programs that share it."""
    BN: gl.constexpr = result.shape[0]
    ROWS: gl.constexpr = result.shape[1]
    WIDE: gl.constexpr = result.type.layout
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    if SPLIT == 1:
        _finish(result, n, token, bias, out, T, N, out_stride, BIAS, ADD)
    else:
        t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, WIDE))
        gl.store(own + part * (BN * ROWS) + t[None, :] * BN + (n - row)[:, None], result)


@gluon.jit
def _finish_part(
    own, part, row, token, bias, out, T, N, out_stride,
    BN: gl.constexpr, ROWS: gl.constexpr, SPLIT: gl.constexpr,
    BIAS: gl.constexpr, ADD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Add the parts of a tile's programs, for this program's share of the rows of x."""
    FEW: gl.constexpr = 16
    n = row + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    few = gl.arange(0, FEW, layout=gl.SliceLayout(0, WIDE))
    for turn in range(part, ROWS // FEW, SPLIT):
        source = own + (turn * FEW + few)[None, :] * BN + (n - row)[:, None]
        result = _sum_of(source, SPLIT, BN * ROWS)
        _finish(result, n, token + turn * FEW, bias, out, T, N, out_stride, BIAS, ADD)


@gluon.jit(do_not_specialize=["T", "row_tiles"])
def _wide_codes(
    x_tiles,
    more_tiles,
    word_tiles,
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
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    ZEROS: gl.constexpr,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
    BN: gl.constexpr,
    STEP: gl.constexpr,
    WORDS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    UNROLL: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    ALL: gl.constexpr = ROWS + MORE
    BYTES: gl.constexpr = BN * WORDS * 4 + ALL * STEP * 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    OTHER: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [num_warps, 1], [16, MORE if MORE else 8, 16]
    )
    OTHER_FIRST: gl.constexpr = gl.DotOperandLayout(0, OTHER, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, num_warps], [0, 1])
    CODES: gl.constexpr = words_layout(BN, num_warps, WORDS * 128 // STEP)
    HALF: gl.constexpr = words_layout(BN, num_warps, WORDS * 64 // STEP)
    OWN: gl.constexpr = gl.SliceLayout(1, HALF)
    GROUPED: gl.constexpr = GROUP != 0
    PARTS: gl.constexpr = STEP // 128
    COLUMNS: gl.constexpr = 64
    # 1. Find the tile, and load its first parts.
    part = gl.program_id(0) % SPLIT
    place = gl.program_id(0) // SPLIT
    row = place // row_tiles * BN
    token = place % row_tiles * ALL
    # Steps behind the last column are filled with zeros.
    each = gl.cdiv(gl.cdiv(K, STEP), SPLIT * UNROLL) * UNROLL
    first = part * each
    steps = gl.minimum(gl.cdiv(K, STEP * UNROLL) * UNROLL - first, each)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN, WORDS], word_tiles.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], x_tiles.layout)
    more_ring = x_ring
    if MORE:
        more_ring = gl.allocate_shared_memory(dtype, [STAGES, MORE, STEP], more_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    own_rows = gl.minimum(row + gl.arange(0, BN, layout=OWN), N - 1) // HEIGHT
    per_group, groups = gl.cdiv(N, HEIGHT), 1
    given = gl.load(scales + own_rows)
    if GROUPED:
        groups = gl.cdiv(K, GROUP)
        given = _scales_of(scales, own_rows, first * PARTS, groups, per_group, GROUP, STEP // PARTS)
    # Codes come first: another kernel may still be writing x.
    for slot in gl.static_range(STAGES):
        mbarrier.expect(bars.index(slot), BYTES, pred=slot < steps)
        _bulk_load(
            word_tiles, [row, (first + slot) * WORDS], bars.index(slot), ring.index(slot),
            pred=slot < steps,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for slot in gl.static_range(STAGES):
        _ask_for_x(
            x_tiles, more_tiles, x_ring, more_ring, bars.index(slot), token, (first + slot) * STEP,
            slot, slot < steps, ROWS, MORE,
        )  # fmt: skip
    # 2. Multiply. The tensor cores work on half a step while the other half is decoded.
    acc = gl.zeros([BN, ROWS], gl.float32, MMA)
    acc_more = gl.zeros([BN, MORE if MORE else 8], gl.float32, OTHER)
    for turn in range(gl.cdiv(steps, UNROLL)):
        for i in gl.static_range(UNROLL * PARTS):
            step = turn * UNROLL + i // PARTS
            at = step % STAGES
            zero = None
            if ZEROS:
                zero = zero_of(given)
            scale = None
            if GROUPED:
                scale = pairs_of(without_zero(given) if ZEROS else given, dtype)
                given = _scales_of(
                    scales, own_rows, (first + step) * PARTS + i % PARTS + 1,
                    groups, per_group, GROUP, STEP // PARTS,
                )  # fmt: skip
            if i % PARTS == 0:
                mbarrier.wait(bars.index(at), step // STAGES & 1)
            words = ring.index(at)
            if PARTS > 1:
                words = words.slice(i % PARTS * (WORDS // PARTS), WORDS // PARTS, dim=1)
            first_words, second_words = _halves(words.load(CODES), HALF)
            value = x_ring.index(at).slice(i % PARTS * (2 * COLUMNS), 2 * COLUMNS, dim=1)
            w = gl.convert_layout(
                decoded(first_words, zero, scale, KIND, dtype, BN, COLUMNS), FIRST
            )
            acc = warpgroup_mma(
                w, value.slice(0, COLUMNS, dim=1).permute([1, 0]), acc, is_async=True
            )
            if MORE:
                value_more = more_ring.index(at).slice(
                    i % PARTS * (2 * COLUMNS), 2 * COLUMNS, dim=1
                )
                w_more = gl.convert_layout(w, OTHER_FIRST)
                acc_more = warpgroup_mma(
                    w_more, value_more.slice(0, COLUMNS, dim=1).permute([1, 0]), acc_more,
                    is_async=True,
                )  # fmt: skip
                if i > 0:
                    acc, acc_more, w, w_more = warpgroup_mma_wait(
                        2, deps=[acc, acc_more, w, w_more]
                    )
            elif i > 0:
                acc, w = warpgroup_mma_wait(1, deps=[acc, w])
            if i % PARTS == 0:
                # All threads are done with the tile before. A later one comes in its place.
                _barrier()
                ahead = step - 1 + STAGES
                _ask(
                    x_tiles, more_tiles, word_tiles, ring, x_ring, more_ring, bars, row, token,
                    first + ahead, (step + STAGES - 1) % STAGES, (step > 0) & (ahead < steps),
                    WORDS, STEP, BYTES, ROWS, MORE,
                )  # fmt: skip
            second_w = gl.convert_layout(
                decoded(second_words, zero, scale, KIND, dtype, BN, COLUMNS), FIRST
            )
            acc = warpgroup_mma(
                second_w, value.slice(COLUMNS, COLUMNS, dim=1).permute([1, 0]), acc,
                is_async=True,
            )  # fmt: skip
            if MORE:
                second_more = gl.convert_layout(second_w, OTHER_FIRST)
                acc_more = warpgroup_mma(
                    second_more, value_more.slice(COLUMNS, COLUMNS, dim=1).permute([1, 0]),
                    acc_more, is_async=True,
                )  # fmt: skip
                acc, acc_more, w, w_more, second_w, second_more = warpgroup_mma_wait(
                    0 if i == UNROLL * PARTS - 1 else 2,
                    deps=[acc, acc_more, w, w_more, second_w, second_more],
                )
            else:
                acc, w, second_w = warpgroup_mma_wait(
                    0 if i == UNROLL * PARTS - 1 else 1, deps=[acc, w, second_w]
                )
    if not GROUPED:
        factor = gl.convert_layout(given, gl.SliceLayout(1, MMA))
        acc *= (without_zero(factor) if ZEROS else factor)[:, None]
    if MORE and not GROUPED:
        factor = gl.convert_layout(given, gl.SliceLayout(1, OTHER))
        acc_more *= (without_zero(factor) if ZEROS else factor)[:, None]
    # 3. Store the sums, or add the parts of a tile's programs.
    own = partials + place.to(tl.int64) * (SPLIT * BN * ALL)
    own_more = own + SPLIT * BN * ROWS
    _store(
        gl.convert_layout(acc, WIDE), own, part, row, token, bias, out, T, N, out_stride,
        SPLIT, BIAS, ADD,
    )  # fmt: skip
    if MORE:
        _store(
            gl.convert_layout(acc_more, WIDE), own_more, part, row, token + ROWS, bias, out, T, N,
            out_stride, SPLIT, BIAS, ADD,
        )  # fmt: skip
    if SPLIT > 1:
        _barrier()
        # A tile's programs start one after the other, and wait for nothing else. So all arrive.
        arrived = gl.atomic_add(counters + place, 1, sem="acq_rel") + 1
        while arrived < SPLIT:
            arrived = gl.atomic_add(counters + place, 0, sem="acquire")
        _finish_part(
            own, part, row, token, bias, out, T, N, out_stride, BN, ROWS, SPLIT, BIAS, ADD, WIDE
        )
        if MORE:
            _finish_part(
                own_more, part, row, token + ROWS, bias, out, T, N, out_stride,
                BN, MORE, SPLIT, BIAS, ADD, WIDE,
            )  # fmt: skip
        _barrier()
        if gl.atomic_add(counters + place, 1, sem="acq_rel") == 2 * SPLIT - 1:
            gl.store(counters + place, 0)


def launch(
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor,
    add: bool,
    c: WideConfig,
) -> None:
    """Launch the kernel. add: whether the product is added to out, [T, N]."""
    (tokens, num_outputs), num_inputs = out.shape, matrix.shape[1]
    assert matrix.in_word == 8 or c.step == STEP, "a row of a tile has at most 128 bytes"
    words = c.step // matrix.in_word
    tiles, row_tiles = cdiv(num_outputs, c.block_n), cdiv(tokens, c.rows + c.more)
    if c.split > 1:
        shared = tiles * row_tiles
        assert shared <= MOST_TILES, f"{c}"
        assert shared * c.split * c.block_n * (c.rows + c.more) <= MOST_PARTIALS, f"{c}"
    workspace = workspace_of(x.device)
    height, width = matrix.group
    layout = gl.NVMMASharedLayout.get_default_for([c.block_n, words], gl.int32)
    codes = matrix.words
    word_tiles = TensorDescriptor(
        codes, list(codes.shape), [codes.stride(0), 1], [c.block_n, words], layout
    )
    _wide_codes[(tiles * row_tiles * c.split,)](
        _tiles(x, c.rows, c.step),
        _tiles(x, c.more or c.rows, c.step),
        word_tiles,
        matrix.scales,
        x if bias is None else bias,
        out,
        workspace.partials,
        workspace.counters,
        tokens,
        num_outputs,
        num_inputs,
        row_tiles,
        out.stride(0),
        matrix.kind,
        width,
        height,
        matrix.zeros,
        c.rows,
        c.more,
        c.block_n,
        c.step,
        words,
        c.stages,
        c.split,
        c.unroll,
        bias is not None,
        add,
        num_warps=c.num_warps,
        **pdl(x),
    )
