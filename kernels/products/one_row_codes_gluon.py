"""x W^T for one row of x, where W is in 8 or 4 bits and its codes wait for x in shared memory.

With one row, a product is short: its beginning and end count as much as its bytes. So a program
asks for all of its rows of W before it waits for x (kernels/quantized/turns_gluon.py), and warps of
one program share out the columns, whose sums so need no other program.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import opens_early
from sidestep.kernels.products.streamed_config import OneRowConfig
from sidestep.kernels.products.streamed_linear_gluon import scale_of, tree_layout, tree_sum
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.quantized.turns_gluon import (
    ask_for_line,
    copies_of_warps,
    inputs_are_there,
    keep_turns,
    kept_words_layout,
    products_of_warps,
    same_columns,
    sum_of_kept,
    words_in_step,
    words_of_warps,
)

# Triton 3.9 has these by other names than 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
_reinterpreted = getattr(
    _memory, "reinterpret" if hasattr(_memory, "reinterpret") else "_reinterpret"
)


@gluon.jit
def _rows_of_warps(
    N, SPLIT: gl.constexpr, TURNS: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr
):
    """Return which rows of W the warps read, 16 each, and the first steps of each one's columns."""
    BN: gl.constexpr = num_warps // SPLIT * 16
    index = gl.arange(0, num_warps * 16, layout=layout)
    row = gl.program_id(0) * BN + index // (16 * SPLIT) * 16 + index % 16
    return gl.minimum(row, N - 1).to(gl.int64), index // 16 % SPLIT * TURNS


@opens_early
@gluon.jit
def _one_row_codes(
    x,
    words,
    scales,
    bias,
    squares,
    next_norm,
    out,
    next_weighted,
    next_squares,
    N,
    eps,
    K: gl.constexpr,
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    SPLIT: gl.constexpr,
    TURNS: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    NEXT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write 16 outputs for SPLIT warps each."""
    dtype: gl.constexpr = x.dtype.element_ty
    FORM: gl.constexpr = (KIND, HEIGHT, GROUP, ZEROS)
    WORDS: gl.constexpr = words_in_step(KIND)
    STEPS: gl.constexpr = (K + 127) // 128
    GROUPS: gl.constexpr = num_warps // SPLIT
    BN: gl.constexpr = GROUPS * 16
    BY_ROW: gl.constexpr = gl.SliceLayout(1, words_of_warps(16, num_warps, WORDS))
    COPIES: gl.constexpr = gl.SliceLayout(1, copies_of_warps(16, num_warps, WORDS))
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    # 1. Ask for all weights.
    read, first = _rows_of_warps(N, SPLIT, TURNS, BY_ROW, num_warps)
    per_group = (N + HEIGHT - 1) // HEIGHT
    at = words, read * (STEPS * WORDS), scales + read // HEIGHT, first, per_group
    read, first = _rows_of_warps(N, SPLIT, TURNS, COPIES, num_warps)
    copied = read * (STEPS * WORDS), first
    memory = gl.allocate_shared_memory(
        gl.int32, [TURNS, num_warps * 16, WORDS], kept_words_layout(WORDS)
    )
    turn_scales = keep_turns(at, copied, memory, 1, STEPS, TURNS, FORM)
    n = gl.program_id(0) * BN + gl.arange(0, BN, layout=OUT)
    inside = n < N
    if NEXT:
        weight = gl.load(next_norm + n, mask=inside, other=0.0).to(gl.float32)
    if BIAS:
        added = gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 2. Copy the inputs to shared memory. Each warp has those of its columns.
    kept = gl.allocate_shared_memory(
        dtype, [TURNS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for turn in gl.static_range(TURNS):
        ask_for_line(kept.index(turn), x, SPLIT, TURNS, 1, turn, K)
    if ADD:
        before = gl.load(out + n, mask=inside, other=0.0).to(gl.float32)
    if PARTS:
        factor = gl.sum(scale_of(squares, 1, eps, K, 1, PARTS, num_warps), 0)
    inputs_are_there()
    # 3. Multiply, and add the warps' shares in order.
    acc = gl.zeros([num_warps, 16, 8], gl.float32, products_of_warps(num_warps))
    acc = sum_of_kept(acc, at, turn_scales, memory, kept, TURNS, FORM)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shares = gl.allocate_shared_memory(gl.float32, [SPLIT, BN], FLAT)
    ordered = same_columns(acc).reshape(GROUPS, SPLIT, 16).permute(1, 0, 2).reshape(SPLIT * BN)
    _reinterpreted(shares, gl.float32, [SPLIT * BN], FLAT).store(ordered)
    _barrier()
    result = shares.index(0).load(OUT)
    for share in gl.static_range(1, SPLIT):
        result += shares.index(share).load(OUT)
    # 4. Scale the result and add to it, and store it.
    if PARTS:
        result *= factor
    if BIAS:
        result += added
    if ADD:
        result += before
    rounded = result.to(dtype)
    gl.store(out + n, rounded, mask=inside)
    if NEXT:
        wide = rounded.to(gl.float32)
        gl.store(next_weighted + n, (wide * weight).to(dtype), mask=inside)
        TREE: gl.constexpr = tree_layout(1, BN, num_warps)
        given = gl.where(inside, wide * wide, 0.0).reshape(1, BN)
        summed = gl.sum(tree_sum(gl.convert_layout(given, TREE)), 0)
        gl.store(next_squares + gl.program_id(0), summed)


def launch(
    x: Tensor,
    matrix: DeviceMatrix,
    tensors: tuple[Tensor, ...],
    eps: float,
    flags_and_gate: tuple[int, bool, bool, bool, bool],
    c: OneRowConfig,
) -> None:
    """Launch the kernel, with arguments as of kernels.products.skinny_linear_triton.launch.

    There is one row, and no gate.
    """
    *flags, gated = flags_and_gate
    bias, squares, next_norm, out, weighted, sums = tensors
    (tokens, num_outputs), num_inputs = out.shape, matrix.shape[1]
    assert tokens == 1 and not gated
    height, width = matrix.group
    turns = cdiv(cdiv(num_inputs, STEP), c.split)
    _one_row_codes[(cdiv(num_outputs, c.block_n),)](
        x,
        matrix.words,
        matrix.scales,
        bias,
        squares,
        next_norm,
        out,
        weighted,
        sums,
        num_outputs,
        eps,
        num_inputs,
        matrix.kind,
        height,
        width,
        matrix.zeros,
        c.split,
        turns,
        *flags,
        num_warps=c.split * c.groups,
        **pdl(x),
    )
