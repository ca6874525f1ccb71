"""x W^T for a few rows of x, where reading W is all the work.

For one row, each program reads a few whole rows of W, multiplies and adds on the plain cores. For 2
to 16 rows, the tensor cores do the same from registers alone, with x padded to 8 or 16 rows. The
loads of W's first columns are issued before the kernel waits for x (programmatic dependent launch),
so the memory does not pause while the kernel before ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import opens_early
from sidestep.kernels.triton.silu_mul_triton import gated_silu

MAX_ROWS = 16


@dataclass(frozen=True)
class SkinnyConfig:
    """Tile of a program: rows of W, and columns of one iteration of its loop.

    benchmarks/kernels/gpu_kernels.py tunes it.
    """

    block_n: int
    block_k: int
    num_warps: int
    tensor_cores: bool = True


@triton.jit
def _scale(squares, tokens, eps, K: tl.constexpr, PARTS: tl.constexpr):
    """Return the norm's factor for these rows of a stream, from parts of the sums of squares."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    EVEN: tl.constexpr = triton.next_power_of_2(PARTS) == PARTS
    given = tl.load(
        squares + tokens[:, None] * PARTS + part[None, :],
        mask=EVEN | (part < PARTS)[None, :],
        other=0.0,
    )
    return tl.rsqrt(tl.sum(given, 1) / K + eps)


@opens_early
@triton.jit
def _gemv(
    x,
    weight,
    bias,
    squares,
    next_norm,
    out,
    next_weighted,
    next_squares,
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    inside = rows < N
    source = weight + rows[:, None].to(tl.int64) * K + columns[None, :]
    EVEN: tl.constexpr = K % BLOCK_K == 0
    w = tl.load(
        source,
        mask=inside[:, None] & (EVEN | (columns < K)[None, :]),
        other=0.0,
        eviction_policy="evict_first",
    )
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        second = source + tl.cast(N, tl.int64) * K
        u = tl.load(
            second,
            mask=inside[:, None] & (EVEN | (columns < K)[None, :]),
            other=0.0,
            eviction_policy="evict_first",
        )
        acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if NEXT:
        scales = tl.load(next_norm + rows, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, K, BLOCK_K):
        # Loaded as wide as W: each thread gets the columns it needs, and the warps need not wait
        # for one another.
        given = tl.broadcast_to((x + start + columns)[None, :], [BLOCK_N, BLOCK_K])
        value = tl.load(given, mask=EVEN | (start + columns < K)[None, :], other=0.0).to(tl.float32)
        if start + BLOCK_K >= K:
            # This work is done while the last columns of W are loading.
            if ADD:
                before = tl.load(out + rows, mask=inside, other=0.0).to(tl.float32)
            if PARTS:
                scale = _scale(squares, tl.arange(0, 1), eps, K, PARTS)
        acc += w.to(tl.float32) * value
        if GATED:
            acc_up += u.to(tl.float32) * value
        if start + BLOCK_K < K:
            there = inside[:, None] & (EVEN | (start + BLOCK_K + columns < K)[None, :])
            w = tl.load(
                source + start + BLOCK_K, mask=there, other=0.0, eviction_policy="evict_first"
            )
            if GATED:
                u = tl.load(
                    second + start + BLOCK_K, mask=there, other=0.0, eviction_policy="evict_first"
                )
    result = tl.sum(acc, 1)
    if PARTS:
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, 1)
        if PARTS:
            up *= scale
        result = gated_silu(result, up, out.dtype.element_ty)
    if ADD:
        result += before
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + rows, rounded, mask=inside)
    if NEXT:
        wide = rounded.to(tl.float32)
        tl.store(next_weighted + rows, (wide * scales).to(out.dtype.element_ty), mask=inside)
        tl.store(next_squares + tl.program_id(0), tl.sum(wide * wide, 0))


@triton.jit
def _rows_of(index, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Return the matrix row of each row of a tile; see _operand."""
    return index // (8 * WARPS) % HALVES * 8 + index % 8


@triton.jit
def _columns_of(index, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Return the matrix columns of each row of a tile; see _operand."""
    first = (index // (8 * WARPS * HALVES) * WARPS + index // 8 % WARPS) * 32
    return first[:, None] + tl.arange(0, 32)[None, :]


@triton.jit
def _operand(tile, STEPS: tl.constexpr, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Return a tile as an operand of a product, [WARPS, HALVES * 8, STEPS * 32].

    The tile is given as it was read, [STEPS * HALVES * WARPS * 8, 32]. A warp reads 8 rows of 64
    bytes at once, 16 bytes a thread. The columns go into the product in an order that leaves them
    in the threads and registers in which a 16-bit tensor-core product needs them. Both operands
    have the same order, so the product is the same, and no value passes through shared memory.
    """
    tile = tl.reshape(tile, [STEPS, HALVES, WARPS, 8, 4, 2, 2, 2])
    tile = tl.permute(tile, [2, 1, 3, 0, 5, 6, 4, 7])
    return tl.reshape(tile, [WARPS, HALVES * 8, STEPS * 32])


@triton.jit
def _read(source, start, columns, K: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Return a tile; columns beyond K are zero."""
    if EVEN:
        return tl.load(source + start, eviction_policy=POLICY)
    else:
        return tl.load(source + start, mask=start + columns < K, other=0.0, eviction_policy=POLICY)


@triton.jit
def _given(
    source,
    start,
    columns,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    STEPS: tl.constexpr,
    GIVEN: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Return columns of x as the second operand of a product, [WARPS, STEPS * 32, ROWS]."""
    return tl.permute(
        _operand(_read(source, start, columns, K, EVEN, ""), STEPS, GIVEN, WARPS), [0, 2, 1]
    )


@opens_early
@triton.jit(do_not_specialize=["T"])
def _skinny(
    x,
    weight,
    bias,
    squares,
    next_norm,
    out,
    next_weighted,
    next_squares,
    T,
    N,
    eps,
    x_stride,
    out_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    HALVES: tl.constexpr = BLOCK_N // 8
    GIVEN: tl.constexpr = ROWS // 8
    TURN: tl.constexpr = STEPS * WARPS * 32
    EVEN: tl.constexpr = K % TURN == 0
    LAST: tl.constexpr = (K - 1) // TURN * TURN
    # 1. Load the first columns of W, of which each warp takes a part of K. Rows behind the last one
    #    are
    #    read as the last.
    index = tl.arange(0, STEPS * HALVES * WARPS * 8)
    row = tl.minimum(tl.program_id(0) * BLOCK_N + _rows_of(index, HALVES, WARPS), N - 1)
    columns = _columns_of(index, HALVES, WARPS)
    source = weight + row[:, None].to(tl.int64) * K + columns
    second = source + tl.cast(N, tl.int64) * K
    w = _read(source, 0, columns, K, EVEN, "evict_first")
    u = w
    if GATED:
        u = _read(second, 0, columns, K, EVEN, "evict_first")
    index = tl.arange(0, STEPS * GIVEN * WARPS * 8)
    token = tl.minimum(_rows_of(index, GIVEN, WARPS), T - 1)
    x_columns = _columns_of(index, GIVEN, WARPS)
    values = x + token[:, None] * x_stride + x_columns
    acc = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    acc_up = tl.zeros([WARPS, BLOCK_N, ROWS], tl.float32)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, ROWS)
    inside = (tokens < T)[None, :] & (rows < N)[:, None]
    if NEXT:
        scales = tl.load(next_norm + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 2. The next columns are loaded before the present ones are used. Without a loop, W stays in
    #    the layout of the product's operand; carried through a loop, it would pass through shared
    #    memory.
    for start in tl.static_range(0, LAST, TURN):
        next_w = _read(source, start + TURN, columns, K, EVEN, "evict_first")
        value = _given(values, start, x_columns, K, EVEN, STEPS, GIVEN, WARPS)
        if GATED:
            next_u = _read(second, start + TURN, columns, K, EVEN, "evict_first")
            acc_up = tl.dot(
                _operand(u, STEPS, HALVES, WARPS), value, acc_up, input_precision="ieee"
            )
            u = next_u
        acc = tl.dot(_operand(w, STEPS, HALVES, WARPS), value, acc, input_precision="ieee")
        w = next_w
    # This work is done while the last columns of W are loading.
    if ADD:
        before = tl.load(out + tokens[None, :] * out_stride + rows[:, None], mask=inside, other=0.0)
    value = _given(values, LAST, x_columns, K, EVEN, STEPS, GIVEN, WARPS)
    if PARTS:
        scale = _scale(squares, tl.minimum(tokens, T - 1), eps, K, PARTS)[None, :]
    acc = tl.dot(_operand(w, STEPS, HALVES, WARPS), value, acc, input_precision="ieee")
    # 3. Add the warps' parts.
    result = tl.sum(acc, 0)
    if PARTS:
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up = tl.sum(
            tl.dot(_operand(u, STEPS, HALVES, WARPS), value, acc_up, input_precision="ieee"), 0
        )
        if PARTS:
            up *= scale
        result = gated_silu(result, up, out.dtype.element_ty)
    if ADD:
        result += before.to(tl.float32)
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + tokens[None, :] * out_stride + rows[:, None], rounded, mask=inside)
    if NEXT:
        wide = rounded.to(tl.float32)
        tl.store(
            next_weighted + tokens[None, :] * N + rows[:, None],
            (wide * scales).to(out.dtype.element_ty),
            mask=inside,
        )
        parts = tl.sum(tl.where(inside, wide * wide, 0.0), 0)
        tl.store(
            next_squares + tokens * tl.num_programs(0) + tl.program_id(0), parts, mask=tokens < T
        )


def gemv_config(num_outputs: int, num_inputs: int, gated: bool) -> SkinnyConfig:
    """Return the configuration for one row."""
    if gated and num_inputs >= 4096:
        return SkinnyConfig(1, 4096, 8, tensor_cores=False)
    # These give enough programs for all processors.
    return (
        SkinnyConfig(4, 512, 4, tensor_cores=False)
        if num_outputs >= 2048
        else SkinnyConfig(2, 1024, 4, tensor_cores=False)
    )


def skinny_config(num_outputs: int, num_inputs: int, gated: bool) -> SkinnyConfig:
    """Return the configuration for 2 to 16 rows."""
    return SkinnyConfig(16, 1024, 4 if num_inputs <= 2048 else 8)


def launch(
    x: Tensor,
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    eps: float,
    flags: tuple[int, bool, bool, bool, bool],
    c: SkinnyConfig,
) -> None:
    """Launch either kernel for kernels/products/own_linear.py.

    tensors: bias, squares, next norm, out, and the two outputs of the next norm. flags: number of
    parts of the squares, then whether there is a bias, an addition, a next norm, a gate.
    """
    bias, squares, next_norm, out, weighted, sums = tensors
    (tokens, num_outputs), num_inputs = out.shape, weight.shape[1]
    grid = (cdiv(num_outputs, c.block_n),)
    if not c.tensor_cores:
        _gemv[grid](
            x,
            weight,
            bias,
            squares,
            next_norm,
            out,
            weighted,
            sums,
            num_outputs,
            eps,
            num_inputs,
            c.block_n,
            c.block_k,
            *flags,
            num_warps=c.num_warps,
            **pdl(x),
        )
        return
    _skinny[grid](
        x,
        weight,
        bias,
        squares,
        next_norm,
        out,
        weighted,
        sums,
        tokens,
        num_outputs,
        eps,
        x.stride(0),
        out.stride(0),
        num_inputs,
        8 if tokens <= 8 else MAX_ROWS,
        c.block_n,
        max(1, c.block_k // (32 * c.num_warps)),
        c.num_warps,
        *flags,
        num_warps=c.num_warps,
        **pdl(x),
    )
