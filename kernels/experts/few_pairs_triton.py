"""The products of experts for a few pairs of a token and an expert, in Triton.

A program multiplies rows of one pair's matrix, or of those of all pairs of one token, which it
streams. Nothing has to be sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.common.choice_triton import (
    NO_CHOICE,
    chosen_expert,
    chosen_experts,
    kernel_choice,
)
from sidestep.kernels.experts.common.expert_activation_triton import gated
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import FewConfig, FewConfigs, WaitingConfig
from sidestep.kernels.l2_triton import prefetch
from sidestep.kernels.launch import cdiv, has_pdl, next_power_of_2, pdl
from sidestep.kernels.launch_order import opens_early, reads_early
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, room_to_begin
from sidestep.kernels.ops.routing import Routed, Undecided

_CHUNKS = 4
"""Threads that prefetch a row."""


@triton.jit
def _weights(weight, rows, there, at, K: tl.constexpr, STEP: tl.constexpr):
    """Return STEP numbers from `at` on of rows [N] of a matrix with K columns, 0 outside.

    there: which rows are read [N]; None for all.
    """
    steps = (at + tl.arange(0, STEP))[None, :]
    inside = steps < K
    if there is not None:
        inside = inside & there[:, None]
    return tl.load(weight + rows[:, None] * K + steps, mask=inside, other=0.0)


@triton.jit
def _added(acc, w, x, at, K: tl.constexpr, STEP: tl.constexpr):
    """Return acc with the products of numbers w [N, STEP] and their inputs from `at` on.

    x: the first input's address, or those of each row [N].
    """
    steps = (at + tl.arange(0, STEP))[None, :]
    if x.type.is_block():
        x = x[:, None]
    value = tl.load(x + steps, mask=steps < K, other=0.0)
    return acc + w.to(tl.float32) * value.to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def _expert_gate_up(
    x,
    weight,
    bias,
    ids,
    out,
    parts,
    logit_bias,
    T,
    scale,
    tiny,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    NORMALISED: tl.constexpr,
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write N inner values of a pair. PARTS: as in KernelChoice; 0 if the ids are given."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    if PARTS > 0:
        row, place = tl.program_id(0) // CHOSEN, tl.program_id(0) % CHOSEN
        expert = chosen_expert(
            parts, logit_bias, row, place, tl.arange(0, 32), T, PARTS, E, WIDE, JOINED
        ).to(tl.int64)
    else:
        expert = tl.load(ids + pair).to(tl.int64)
    stop = D
    if SOME:
        stop = tl.where(expert < 0, 0, D)
    rows = expert * 2 * F + tl.minimum(columns, F - 1)
    own = x + pair // CHOSEN * D
    gate = tl.zeros([N, STEP], tl.float32)
    up = tl.zeros([N, STEP], tl.float32)
    for at in tl.range(0, stop, STEP, num_stages=STAGES):
        gate = _added(gate, _weights(weight, rows, None, at, D, STEP), own, at, D, STEP)
        up = _added(up, _weights(weight, rows + F, None, at, D, STEP), own, at, D, STEP)
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        own = bias + expert * 2 * F + columns
        there = columns < (tl.where(expert < 0, 0, F) if SOME else F)
        gate_sum += tl.load(own, mask=there, other=0.0).to(tl.float32)
        up_sum += tl.load(own + F, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    activated = gated(gate_sum, up_sum, dtype, GELU, ALPHA, LIMIT)
    tl.store(out + pair * F + columns, activated.to(dtype), mask=columns < F)


@opens_early
@reads_early("ids", "parts")
@triton.jit(do_not_specialize=["T"])
def _expert_down(
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
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    NORMALISED: tl.constexpr,
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    CHOSEN: tl.constexpr,
    KEPT: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add N outputs of all experts of a token, which are multiplied at once.

    PARTS: as in KernelChoice; 0 if the ids and weights are given. AHEAD: numbers that a thread
    prefetches, or 0. NEXT: whether to begin the next norm too.
    """
    token = tl.program_id(0).to(tl.int64)
    # A row is an output of an expert: first those of the first one.
    place = tl.arange(0, KEPT * N) // N
    column = tl.program_id(1) * N + tl.arange(0, KEPT * N) % N
    taken = tl.minimum(place, CHOSEN - 1)
    pair = token * CHOSEN + taken
    # The kernel before waited for the ids or logits, so they are there. The first weights load
    # while it runs.
    if PARTS > 0:
        expert, share = chosen_experts(
            parts, logit_bias, tl.program_id(0), taken, tl.arange(0, 32), T, scale, tiny,
            PARTS, E, WIDE, CHOSEN, NORMALISED, JOINED, GATED,
        )  # fmt: skip
        expert = expert.to(tl.int64)
    else:
        expert = tl.load(ids + pair).to(tl.int64)
    there = place < CHOSEN
    if SOME:
        there = there & (expert >= 0)
    rows = tl.where(there, expert, 0) * D + tl.minimum(column, D - 1)
    inside = None
    if SOME or KEPT != CHOSEN:
        inside = there
    acc = tl.zeros([KEPT * N, STEP], tl.float32)
    values = inner + pair * F
    w = _weights(weight, rows, inside, 0, F, STEP)
    if AHEAD > 0:
        # The rest of the rows, a chunk of AHEAD numbers for each thread.
        chunk: tl.constexpr = (F - STEP) // AHEAD
        starts = weight + rows[:, None] * F + STEP + (tl.arange(0, chunk) * AHEAD)[None, :]
        prefetch(starts, AHEAD * weight.dtype.element_ty.primitive_bitwidth // 8)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = _added(acc, w, values, 0, F, STEP)
    for at in tl.range(STEP, F, STEP, num_stages=STAGES):
        acc = _added(acc, _weights(weight, rows, inside, at, F, STEP), values, at, F, STEP)
    result = tl.sum(acc, 1)
    if bias is not None:
        own = bias + expert * D + column
        result += tl.load(own, mask=there & (column < D), other=0.0).to(tl.float32)
    if PARTS == 0:
        share = tl.load(weights + pair)
    result = tl.where(there, share * result, 0.0)
    total = tl.sum(result.reshape(KEPT, N), 0)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    target = out + token * D + columns
    if ADD:
        total += tl.load(target, mask=columns < D, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(target, rounded, mask=columns < D)
    if NEXT:
        wide = tl.where(columns < D, rounded.to(tl.float32), 0.0)
        norm = tl.load(next_norm + columns, mask=columns < D, other=0.0).to(tl.float32)
        weighted = (wide * norm).to(out.dtype.element_ty)
        tl.store(next_weighted + token * D + columns, weighted, mask=columns < D)
        place = next_squares + token * tl.num_programs(1) + tl.program_id(1)
        tl.store(place, tl.sum(wide * wide, 0))


def _ahead(weight: Tensor, c: FewConfig) -> int:
    """Return the numbers of a row that a thread prefetches; 0 if their addresses are not even."""
    rest = weight.shape[-1] - c.step
    ahead = rest // _CHUNKS
    aligned = ahead * weight.element_size() % 16 == 0 and rest % _CHUNKS == 0
    even = weight.shape[-1] * weight.element_size() % 16 == 0
    return ahead if rest > 0 and aligned and even else 0


def multiply_few(
    x: Tensor,
    routed: Routed | Undecided,
    out: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: tuple[bool, float | None, float | None],
    configs: FewConfigs,
    *,
    add: bool,
    some: bool,
    norm: RmsNorm | None = None,
) -> BegunNorm | None:
    """Write or add what multiply_experts does. activation: `gelu`, alpha and limit of a clamp.

    routed: of rows whose experts are not chosen yet, those that kernels can choose.
    """
    ids, weights = routed if isinstance(routed, Routed) else (None, None)
    choice = kernel_choice(routed) if isinstance(routed, Undecided) else NO_CHOICE
    (rows, width), chosen, inner_width = x.shape, routed.chosen, gate_up.num_rows // 2
    inner, kind = x.new_empty(rows * chosen, inner_width), pdl(x)
    c = configs.gate_up
    _expert_gate_up[(rows * chosen, cdiv(inner_width, c.columns))](
        x,
        gate_up.values,
        gate_up.bias,
        ids,
        inner,
        *choice,
        width,
        inner_width,
        chosen,
        c.columns,
        c.step,
        c.stages,
        *activation,
        some,
        num_warps=c.warps,
        **kind,
    )
    last = configs.down
    begun = room_to_begin(norm, out, cdiv(width, last.columns))
    if isinstance(last, WaitingConfig):
        # Not every version of Triton has its language.
        from sidestep.kernels.experts.few_down_gluon import launch

        given = routed if isinstance(routed, Routed) else None
        launch(inner, down, given, out, norm, begun, choice, chosen, last, add=add, some=some)
        return begun
    _expert_down[(rows, cdiv(width, last.columns))](
        inner,
        down.values,
        down.bias,
        ids,
        weights,
        out,
        None if norm is None else norm.weight,
        *(begun or (None, None)),
        *choice,
        width,
        inner_width,
        chosen,
        next_power_of_2(chosen),
        last.columns,
        last.step,
        last.stages,
        _ahead(down.values, last) if rows == 1 and has_pdl(x.device) else 0,
        add,
        begun is not None,
        some,
        num_warps=last.warps,
        # Masks of other ranks' experts take more of them than that.
        maxnreg=None if some else last.registers,
        **kind,
    )
    return begun
