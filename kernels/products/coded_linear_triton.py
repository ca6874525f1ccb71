"""x W^T where W is in 8 or 4 bits, for any number of rows of x.

A program takes some rows of W, or a part of their columns, and some rows of x. The codes come
through shared memory in steps of 128 columns, several of which are loading at a time. They are
decoded in registers, and go from there into the tensor cores as the first operand of W x^T, which
has at least 64 rows where the second one needs only 8 columns.

Numbers of codes are exact in 16 bits. Where a step has one scale, the step's product is multiplied
by it, in float32. Where it has several, or minimums, the numbers are multiplied and rounded.

The bits of a row of the result depend on that row of x alone, for all numbers of rows that have the
same rows of W in a program and the same split: sums have a fixed order, whatever the layout of
registers. Where several programs share the columns of a tile, the last one to arrive adds the
parts, always in the same order.

kernels/products/own_linear.py lists the kernel's other features.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.l2_triton import prefetch
from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.products.partial_sums import MOST_PARTIALS, MOST_TILES, workspace_of
from sidestep.kernels.quantized.decoding_triton import numbers, without_zero, zero_of
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.triton.silu_mul_triton import gated_silu


@dataclass(frozen=True)
class CodedConfig:
    """Tile of a program: rows of W (of each half, if gated) and of x, and how it is computed."""

    block_n: int
    rows: int
    split: int = 1
    """Number of programs that share a tile's columns."""
    num_warps: int = 4
    num_stages: int = 4
    """Steps that are loading or computed at a time."""


@triton.jit
def _sum_of_pairs(v, WIDTH: tl.constexpr):
    """Return the sums of the rows of v [M, WIDTH], in an order that no layout changes."""
    for _ in tl.static_range(WIDTH.bit_length() - 1):
        a, b = v.reshape(v.shape[0], v.shape[1] // 2, 2).split()
        v = a + b
    return v.reshape(v.shape[0])


@triton.jit
def _norm_scale(squares, tokens, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """Return the norm's factor for these rows of a stream, from parts of the sums of squares."""
    WIDTH: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, WIDTH)
    given = tl.load(
        squares + tokens[:, None] * PARTS + part[None, :],
        mask=(part < PARTS)[None, :],
        other=0.0,
    )
    return tl.rsqrt(_sum_of_pairs(given, WIDTH) / K + eps)


@triton.jit
def _step(
    words,
    scales,
    minimums,
    zero,
    at,
    value,
    acc,
    n,
    per_group,
    KIND: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    IN_WORD: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return acc plus the product of a step's columns. n: places of rows among a group's scales.

    FEW: whether there are few rows of x, so that the product with a group of columns is scaled, not
    each number.
    """
    codes = tl.load(words + at // IN_WORD, eviction_policy="evict_first")
    wide: tl.constexpr = value.dtype
    if GROUP == 0 or GROUP >= STEP:
        # The caller's scales, minimums and zeros are those of whole rows.
        scale, minimum = scales, minimums
        if GROUP >= STEP:
            place = n + at // GROUP * per_group
            scale = tl.load(scales + place)
            if ZEROS:
                zero, scale = zero_of(scale), without_zero(scale)
            if minimums is not None:
                minimum = tl.load(minimums + place)
        w = numbers(codes, zero, KIND, wide, BN, STEP)
        if minimums is not None:
            w = (w.to(tl.float32) * scale[:, None] - minimum[:, None]).to(wide)
        elif GROUP >= STEP and FEW:
            return acc + tl.dot(w, value.T, input_precision="ieee") * scale[:, None]
        elif GROUP >= STEP:
            # float32 would take registers that are not there.
            w *= scale.to(wide)[:, None]
        return tl.dot(w, value.T, acc, input_precision="ieee")
    else:
        GROUPS: tl.constexpr = STEP // GROUP
        group = at // GROUP + tl.arange(0, GROUPS)
        place = n[:, None] + (group * per_group)[None, :]
        inside = (K % STEP == 0) | (group * GROUP < K)[None, :]
        scale = tl.load(scales + place, mask=inside, other=0.0)
        w = numbers(codes, None, KIND, wide, BN, STEP)
        v = w.to(tl.float32).reshape(BN, GROUPS, STEP // GROUPS)
        if ZEROS:
            v -= (zero_of(scale) - 8).to(tl.float32)[:, :, None]
            scale = without_zero(scale)
        v *= scale[:, :, None]
        if minimums is not None:
            v -= tl.load(minimums + place, mask=inside, other=0.0)[:, :, None]
        w = v.reshape(BN, STEP).to(wide)
        return tl.dot(w, value.T, acc, input_precision="ieee")


@triton.jit
def _sum_of(parts, NUMBER: tl.constexpr, SIZE: tl.constexpr):
    """Return the sum of the parts in order, read past the L1 cache, which may hold stale values."""
    total = tl.load(parts, cache_modifier=".cg")
    for part in tl.static_range(1, NUMBER):
        total += tl.load(parts + part * SIZE, cache_modifier=".cg")
    return total


# If the compiler knew that there is one row of tiles, it would compile that apart.
@triton.jit(do_not_specialize=["T", "row_tiles"])
def _coded(
    x,
    words,
    scales,
    minimums,
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
    row_tiles,
    eps,
    x_stride,
    out_stride,
    KIND: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    IN_WORD: tl.constexpr = 4 if KIND == "fp8" or KIND == "int8" else 8
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    EACH: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    W: tl.constexpr = STEPS * STEP // IN_WORD
    # 1. Find the tile's rows. Rows behind the last one are read as the last.
    part = tl.program_id(0) % SPLIT
    place = tl.program_id(0) // SPLIT
    tile = place // row_tiles
    rows = tile * BN + tl.arange(0, BN)
    tokens = place % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.minimum(rows, N - 1)
    total = N * 2 if GATED else N
    per_group = (total + HEIGHT - 1) // HEIGHT
    first = part * EACH
    columns = tl.arange(0, STEP)
    codes = tl.arange(0, STEP // IN_WORD)
    source = words + n[:, None].to(tl.int64) * W + codes[None, :]
    second = source + tl.cast(N, tl.int64) * W
    if PDL:
        AHEAD: tl.constexpr = min(512, EACH * STEP // IN_WORD * 4)
        start = tl.minimum(first * (STEP // IN_WORD), W - AHEAD // 4)
        prefetch(words + n.to(tl.int64) * W + start, AHEAD)
        if GATED:
            prefetch(words + (n + N).to(tl.int64) * W + start, AHEAD)
    group_row, up_group_row = n // HEIGHT, (n + N) // HEIGHT
    scale, zero = scales, None
    up_scale, up_zero = scales, None
    least, up_least = minimums, minimums
    if GROUP == 0:
        scale = tl.load(scales + group_row)
        if ZEROS:
            zero, scale = zero_of(scale), without_zero(scale)
        if minimums is not None:
            least = tl.load(minimums + group_row)
        if GATED:
            up_scale = tl.load(scales + up_group_row)
            if ZEROS:
                up_zero, up_scale = zero_of(up_scale), without_zero(up_scale)
            if minimums is not None:
                up_least = tl.load(minimums + up_group_row)
    inside = (tokens < T)[None, :] & (rows < N)[:, None]
    target = out + tokens[None, :].to(tl.int64) * out_stride + rows[:, None]
    values = x + tl.minimum(tokens, T - 1)[:, None].to(tl.int64) * x_stride + columns[None, :]
    acc = tl.zeros([BN, ROWS], tl.float32)
    acc_up = tl.zeros([BN, ROWS], tl.float32)
    FEW: tl.constexpr = ROWS <= 64 or x.dtype.element_ty == tl.float32
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # 2. Multiply step by step.
    for step in tl.range(first, tl.minimum(first + EACH, STEPS), num_stages=STAGES):
        at = step * STEP
        if K % STEP == 0:
            value = tl.load(values + at)
        else:
            value = tl.load(values + at, mask=(at + columns < K)[None, :], other=0.0)
        acc = _step(
            source, scale, least, zero, at, value, acc, group_row, per_group,
            KIND, K, BN, STEP, IN_WORD, GROUP, ZEROS, FEW,
        )  # fmt: skip
        if GATED:
            acc_up = _step(
                second, up_scale, up_least, up_zero, at, value, acc_up, up_group_row,
                per_group, KIND, K, BN, STEP, IN_WORD, GROUP, ZEROS, FEW,
            )  # fmt: skip
    # 3. Add the parts of a tile's programs.
    result, up = acc, acc_up
    last = True
    if SPLIT > 1:
        HALF: tl.constexpr = SPLIT * BN * ROWS
        own = (
            partials
            + place.to(tl.int64) * (2 * HALF if GATED else HALF)
            + tl.arange(0, ROWS)[None, :] * BN
            + tl.arange(0, BN)[:, None]
        )
        tl.store(own + part * BN * ROWS, acc)
        if GATED:
            tl.store(own + HALF + part * BN * ROWS, acc_up)
        tl.debug_barrier()
        last = tl.atomic_add(counters + place, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(counters + place, 0)
            result = _sum_of(own, SPLIT, BN * ROWS)
            if GATED:
                up = _sum_of(own + HALF, SPLIT, BN * ROWS)
    # 4. Scale, add and activate the result, and store it.
    if last:
        dtype: tl.constexpr = out.dtype.element_ty
        if GROUP == 0 and minimums is None:
            result *= scale[:, None]
            if GATED:
                up *= up_scale[:, None]
        if PARTS:
            factor = _norm_scale(squares, tl.minimum(tokens, T - 1), eps, K, PARTS)[None, :]
            result *= factor
            if GATED:
                up *= factor
        if BIAS:
            result += tl.load(bias + n).to(tl.float32)[:, None]
        if GATED:
            if BIAS:
                up += tl.load(bias + N + n).to(tl.float32)[:, None]
            result = gated_silu(result, up, dtype)
        if ADD:
            result += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(dtype)
        tl.store(target, rounded, mask=inside)
        if NEXT:
            wide = rounded.to(tl.float32)
            norm = tl.load(next_norm + n).to(tl.float32)[:, None]
            weighted = next_weighted + tokens[None, :] * N + rows[:, None]
            tl.store(weighted, (wide * norm).to(dtype), mask=inside)
            parts = _sum_of_pairs(tl.where(inside, wide * wide, 0.0).T, BN)
            tiles = tl.cdiv(N, BN)
            tl.store(next_squares + tokens * tiles + tile, parts, mask=tokens < T)


def launch(
    x: Tensor,
    matrix: DeviceMatrix,
    tensors: tuple[Tensor, ...],
    eps: float,
    flags: tuple[int, bool, bool, bool, bool],
    c: CodedConfig,
) -> None:
    """Launch the kernel, with arguments as of kernels.products.skinny_linear_triton.launch."""
    bias, squares, next_norm, out, weighted, sums = tensors
    (tokens, num_outputs), num_inputs = out.shape, matrix.shape[1]
    gated = flags[-1]
    tiles, row_tiles = cdiv(num_outputs, c.block_n), cdiv(tokens, c.rows)
    if c.split > 1:
        shared = tiles * row_tiles
        sums_left = shared * c.split * c.block_n * c.rows * (1 + gated)
        assert shared <= MOST_TILES and sums_left <= MOST_PARTIALS, f"{c}"
    workspace = workspace_of(x.device)
    height, width = matrix.group
    _coded[(tiles * row_tiles * c.split,)](
        x,
        matrix.words,
        matrix.scales,
        matrix.minimums,
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
        row_tiles,
        eps,
        x.stride(0),
        out.stride(0),
        matrix.kind,
        num_inputs,
        width,
        height,
        matrix.zeros,
        c.rows,
        c.block_n,
        STEP,
        c.split,
        c.num_stages,
        *flags,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        **pdl(x),
    )
