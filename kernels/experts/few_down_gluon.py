"""The last product of experts for a few pairs, whose matrices wait in shared memory.

A program has a few outputs of all of a token's experts. It asks for all of their rows before it
waits for the inner values. The copies need no registers, of which the kernel before leaves few, so
none is put off until the inner values are there. Then one pass over shared memory is left.

The experts that are more than a power of two are few: often a shared one. All warps share out their
columns.

The experts of a token are added in the order of its choice, so a row's bits depend neither on the
number of rows nor on that of warps. It does what `_expert_down` in few_pairs_triton.py does.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sidestep.kernels.experts.common.choice_triton import KernelChoice, token_experts
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import WaitingConfig, kept_experts
from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import opens_early, reads_early
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm
from sidestep.kernels.ops.routing import Routed

# Triton 3.9 has these by other names than 3.6.
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
_reinterpreted = getattr(
    _memory, "reinterpret" if hasattr(_memory, "reinterpret") else "_reinterpret"
)

_COLUMNS = gl.constexpr(64)
"""Columns of a step: those of eight threads, each of which loads 16 bytes."""
_LAST_WARPS = gl.constexpr(4)
"""Warps that share out the columns of the last experts, which are fewer than warps."""


@gluon.jit
def _ask_for_weights(weight, rows, there, F: gl.constexpr, C: gl.constexpr, FULL: gl.constexpr):
    """Return memory [steps, experts, N, C], into which rows [experts, N] of matrices load.

    there [experts]: which experts are there.
    """
    STEPS: gl.constexpr = (F + C - 1) // C
    column = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, FULL)))[None, None, :]
    source = weight + rows[:, :, None] * F + column
    kept = gl.allocate_shared_memory(
        weight.dtype.element_ty,
        [STEPS, rows.shape[0], rows.shape[1], C],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )
    for step in gl.static_range(STEPS):
        inside = (step * C + column < F) & there[:, None, None]
        _load(kept.index(step), source + step * C, mask=inside)
    return kept


@gluon.jit
def _ask_for_inner(
    inner, FIRST: gl.constexpr, COUNT: gl.constexpr, CHOSEN: gl.constexpr, F: gl.constexpr,
    C: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Return memory [steps, COUNT, C], into which inner values of pairs from FIRST on load."""
    STEPS: gl.constexpr = (F + C - 1) // C
    INNER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    values = gl.allocate_shared_memory(
        inner.dtype.element_ty, [STEPS, COUNT, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    place = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(1, INNER))
    within = gl.arange(0, C, layout=gl.SliceLayout(0, INNER))
    given = inner + gl.minimum(place, CHOSEN - 1)[:, None] * F + within[None, :]
    for step in gl.static_range(STEPS):
        _load(values.index(step), given + step * C, mask=(step * C + within < F)[None, :])
    return values


@gluon.jit
def _with_step(acc, kept, values, FULL: gl.constexpr):
    """Return acc [experts, N, C] with the products of a step's weights and inner values."""
    value = values.load(gl.SliceLayout(1, FULL)).to(gl.float32)
    return acc + kept.load(FULL).to(gl.float32) * gl.expand_dims(value, 1)


@gluon.jit
def _results(
    kept, values, bias, rows, row, there, share, F: gl.constexpr, C: gl.constexpr, D: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """Return the experts' results [experts, N], each with its weight, in shared memory.

    row [N]: the outputs; rest as of _ask_for_weights. A thread reads the weights that it has copied
    itself.
    """
    STEPS: gl.constexpr = (F + C - 1) // C
    UNROLLED: gl.constexpr = STEPS if STEPS < 16 else 16
    acc = gl.zeros([rows.shape[0], rows.shape[1], C], gl.float32, FULL)
    for step in gl.static_range(UNROLLED):
        acc = _with_step(acc, kept.index(step), values.index(step), FULL)
    for step in range(UNROLLED, STEPS):
        acc = _with_step(acc, kept.index(step), values.index(step), FULL)
    result = gl.sum(acc, 2)
    if bias is not None:
        mask = there[:, None] & (row < D)[None, :]
        result += gl.load(bias + rows, mask=mask, other=0.0).to(gl.float32)
    result = gl.where(there[:, None], share[:, None] * result, 0.0)
    results = gl.allocate_shared_memory(
        gl.float32, [rows.shape[0], rows.shape[1]], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    _reinterpreted(results, gl.float32, [rows.shape[0], rows.shape[1]], lines).store(result)
    return results


@gluon.jit
def _rows_of_experts(
    ids, weights, parts, logit_bias, lane, T, scale, tiny, PARTS: gl.constexpr, E: gl.constexpr,
    WIDE: gl.constexpr, NORMALISED: gl.constexpr, JOINED: gl.constexpr, GATED: gl.constexpr,
    CHOSEN: gl.constexpr, SOME: gl.constexpr, D: gl.constexpr, N: gl.constexpr,
    FIRST: gl.constexpr, COUNT: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Return what a program needs of a token's COUNT experts from the place FIRST on.

    It is which of them are there [COUNT], their shares [COUNT], the program's outputs [N], and
    these rows of their matrices [COUNT, N].
    """
    ROWS: gl.constexpr = gl.SliceLayout(2, FULL)
    place = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(1, ROWS))
    expert, share = token_experts(
        ids, weights, parts, logit_bias, gl.minimum(place, CHOSEN - 1), lane, T, scale, tiny,
        PARTS, E, WIDE, NORMALISED, JOINED, GATED, CHOSEN,
    )  # fmt: skip
    there = place < CHOSEN
    if SOME:
        there = there & (expert >= 0)
    matrix = gl.where(there, expert, 0).to(gl.int64)
    row = gl.program_id(1) * N + gl.arange(0, N, layout=gl.SliceLayout(0, ROWS))
    return there, share, row, matrix[:, None] * D + gl.minimum(row, D - 1)[None, :]


@opens_early
@reads_early("ids", "parts")
@gluon.jit(do_not_specialize=["T"])
def _few_down(
    inner,
    weight,
    bias,
    ids,
    weights,
    out,
    next_norm,
    next_weighted,
    next_squares,
    parts,
    logit_bias,
    T,
    scale,
    tiny,
    PARTS: gl.constexpr,
    E: gl.constexpr,
    WIDE: gl.constexpr,
    NORMALISED: gl.constexpr,
    JOINED: gl.constexpr,
    GATED: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    CHOSEN: gl.constexpr,
    KEPT: gl.constexpr,
    LAST: gl.constexpr,
    N: gl.constexpr,
    ADD: gl.constexpr,
    NEXT: gl.constexpr,
    SOME: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add N outputs of all experts of a token; arguments are as of _expert_down.

    KEPT, LAST: powers of two, with room for the first experts and, if not 0, for those behind them.
    """
    dtype: gl.constexpr = inner.dtype.element_ty
    C: gl.constexpr = _COLUMNS
    WARPS: gl.constexpr = num_warps if num_warps < KEPT else KEPT
    FULL: gl.constexpr = gl.BlockedLayout(
        [1, N // 4, 8], [1, 4, 8], [WARPS, num_warps // WARPS, 1], [2, 1, 0]
    )
    # The last experts' columns are shared out alike among four and eight warps, so that bits do not
    # depend on their number.
    OTHERS: gl.constexpr = num_warps // _LAST_WARPS
    MORE_C: gl.constexpr = C * _LAST_WARPS
    EACH: gl.constexpr = N // (4 * OTHERS) if N > 4 * OTHERS else 1
    MORE: gl.constexpr = gl.BlockedLayout(
        [1, EACH, 8], [1, 4, 8], [1, OTHERS, _LAST_WARPS], [2, 1, 0]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    token = gl.program_id(0).to(gl.int64)
    # 1. Ask for the weights. The kernel before waited for the ids or logits, so they are there.
    lane = gl.arange(0, 32, layout=OUT)
    there, share, row, rows = _rows_of_experts(
        ids, weights, parts, logit_bias, lane, T, scale, tiny, PARTS, E, WIDE, NORMALISED, JOINED,
        GATED, CHOSEN, SOME, D, N, 0, KEPT, FULL,
    )  # fmt: skip
    if LAST > 0:
        more_there, more_share, more_row, more_rows = _rows_of_experts(
            ids, weights, parts, logit_bias, lane, T, scale, tiny, PARTS, E, WIDE, NORMALISED,
            JOINED, GATED, CHOSEN, SOME, D, N, KEPT, LAST, MORE,
        )  # fmt: skip
    kept = _ask_for_weights(weight, rows, there, F, C, FULL)
    if LAST > 0:
        more_kept = _ask_for_weights(weight, more_rows, more_there, F, MORE_C, MORE)
    async_copy.commit_group()
    columns = gl.program_id(1) * N + gl.arange(0, N, layout=OUT)
    if NEXT:
        norm = gl.load(next_norm + columns, mask=columns < D, other=0.0).to(gl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # 2. Ask for the inner values.
    inner += token * (CHOSEN * F)
    values = _ask_for_inner(inner, 0, KEPT, CHOSEN, F, C, num_warps)
    if LAST > 0:
        more_values = _ask_for_inner(inner, KEPT, LAST, CHOSEN, F, MORE_C, num_warps)
    async_copy.commit_group()
    target = out + token * D + columns
    if ADD:
        before = gl.load(target, mask=columns < D, other=0.0).to(gl.float32)
    async_copy.wait_group(0)
    _barrier()
    # 3. Multiply, and add the experts in order.
    results = _results(kept, values, bias, rows, row, there, share, F, C, D, FULL)
    if LAST > 0:
        more = _results(
            more_kept, more_values, bias, more_rows, more_row, more_there, more_share,
            F, MORE_C, D, MORE,
        )  # fmt: skip
    _barrier()
    total = results.index(0).load(OUT)
    for index in gl.static_range(1, KEPT):
        total += results.index(index).load(OUT)
    if LAST > 0:
        for index in gl.static_range(CHOSEN - KEPT):
            total += more.index(index).load(OUT)
    if ADD:
        total += before
    rounded = total.to(dtype)
    gl.store(target, rounded, mask=columns < D)
    if NEXT:
        wide = gl.where(columns < D, rounded.to(gl.float32), 0.0)
        gl.store(next_weighted + token * D + columns, (wide * norm).to(dtype), mask=columns < D)
        square = next_squares + token * gl.num_programs(1) + gl.program_id(1)
        gl.store(square, gl.sum(wide * wide, 0))


def launch(
    inner: Tensor,
    down: ExpertMatrix,
    routed: Routed | None,
    out: Tensor,
    norm: RmsNorm | None,
    begun: BegunNorm | None,
    choice: KernelChoice,
    chosen: int,
    config: WaitingConfig,
    *,
    add: bool,
    some: bool,
) -> None:
    """Launch the kernel, for kernels/experts/few_pairs_triton.py."""
    rows, width = out.shape
    _few_down[(rows, cdiv(width, config.columns))](
        inner,
        down.values,
        down.bias,
        *(routed or (None, None)),
        out,
        None if norm is None else norm.weight,
        *(begun or (None, None)),
        *choice,
        width,
        inner.shape[1],
        chosen,
        *kept_experts(chosen),
        config.columns,
        add,
        begun is not None,
        some,
        num_warps=config.warps,
        # Two programs share a processor's 64 Ki registers.
        maxnreg=min(255, (64 << 10) // (2 * 32 * config.warps)),
        **pdl(out),
    )
