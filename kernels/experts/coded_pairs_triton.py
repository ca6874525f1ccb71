"""The products of coded experts for a few pairs of a token and an expert, in Triton.

A program decodes some rows of matrices in registers, and the tensor cores multiply them with up to
16 columns of inputs. In the first kernel these are the inputs of all pairs that an expert has,
so that it is read and decoded once. In the second one they are the inner values of one token's
pairs: of each row's products, that with its own expert's values is kept. Nothing has to be sorted.

A column of the tensor cores' result does not depend on the others, so a token's bits depend on that
token alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.common.choice_triton import (
    NO_CHOICE,
    KernelChoice,
    chosen_expert,
    chosen_experts,
    kernel_choice,
)
from sidestep.kernels.experts.common.expert_activation_triton import gated
from sidestep.kernels.experts.common.experts_config import CodedConfigs
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.expert_codes_triton import coded_product
from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import reads_early
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, room_to_begin
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.device_matrix import STEP

_LEAST = 16
"""Columns of the tensor cores' second operand that Triton takes as such at least."""


@triton.jit
def _pairs(order, experts, place, expert, slot, P, M: tl.constexpr, WIDTH: tl.constexpr):
    """Return the pairs of a program by their slots, of M; others than 0 to P - 1 are none.

    Without an order, they are the M pairs of an expert from this place on, in the order of their
    numbers, if a multiple of M come before it. Else another program takes this pair.
    """
    if order is not None:
        return tl.load(order + place * M + slot)
    elif WIDTH == 0:
        return tl.where(slot == 0, place, -1)
    else:
        every = tl.arange(0, WIDTH)
        same = (tl.load(experts + every, mask=every < P, other=-2) == expert).to(tl.int32)
        before = tl.sum(tl.where(every < place, same, 0), 0)
        number = tl.cumsum(same, 0) - 1 - before
        taken = (number[None, :] == slot[:, None]) & (same == 1)[None, :]
        found = tl.max(tl.where(taken, every[None, :], -1), 1)
        return tl.where(before % M == 0, found, -1)


@triton.jit(do_not_specialize=["P", "T"])
def _coded_gate_up(
    x,
    words,
    scales,
    bias,
    order,
    experts,
    out,
    P,
    parts,
    logit_bias,
    T,
    scale,
    tiny,
    PARTS: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    NORMALISED: tl.constexpr,
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write N inner values of an expert's pairs.

    order: the pairs in tiles of M, whose experts are given; or None where the experts are those of
    all pairs. WIDTH is then at least P, or 0 for one token. PARTS: as in KernelChoice; 0 if the
    experts are given. A token by itself may choose.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    if PARTS > 0:
        expert = chosen_expert(
            parts, logit_bias, 0, place, tl.arange(0, 32), T, PARTS, LOGITS, WIDE, JOINED
        )
    else:
        expert = tl.load(experts + place)
    pairs = _pairs(order, experts, place, expert, tl.arange(0, M), P, M, WIDTH)
    known = (pairs >= 0) & (pairs < P)
    # Programs of experts that are not here, of tiles that are not needed, and of pairs that another
    # program takes do nothing.
    if (expert >= 0) & (expert < E) & (tl.max(known.to(tl.int32), 0) == 1):
        read = tl.where(known, pairs, 0).to(tl.int64)
        matrix = expert.to(tl.int64)
        first = tl.program_id(1) * N
        both = tl.arange(0, 2 * N)
        rows = tl.minimum(first + both % N, F - 1) + both // N * F
        values = x + (read // CHOSEN * D)[:, None]
        acc = coded_product(
            values, known, words, scales, rows, None, matrix, 2 * F,
            D, STEP, STAGES, FORM, M <= 64,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + matrix * 2 * F + rows).to(tl.float32)[:, None]
        gate, up = acc.reshape(2, N, M).permute(1, 2, 0).split()
        dtype: tl.constexpr = out.dtype.element_ty
        activated = gated(gate, up, dtype, GELU, ALPHA, LIMIT).to(dtype)
        columns = first + tl.arange(0, N)
        target = out + (read * F)[None, :] + columns[:, None]
        tl.store(target, activated, mask=known[None, :] & (columns < F)[:, None])


@reads_early("ids", "parts")
@triton.jit(do_not_specialize=["T"])
def _coded_down(
    inner,
    words,
    scales,
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
    M: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add N outputs of all experts of a token.

    PARTS: as in KernelChoice; 0 if the ids and weights are given. NEXT: whether to begin the next
    norm too.
    """
    token = tl.program_id(0).to(tl.int64)
    # A row is an output of an expert: first those of the first one.
    place = tl.arange(0, KEPT * N) // N
    column = tl.program_id(1) * N + tl.arange(0, KEPT * N) % N
    taken = tl.minimum(place, CHOSEN - 1)
    pair = token * CHOSEN + taken
    # The kernel before waited for the ids or logits, so they are there.
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
    rows = tl.minimum(column, D - 1)
    read = tl.where(there, expert, 0)
    inside = None
    if SOME or KEPT != CHOSEN:
        inside = there
    slot = tl.arange(0, M)
    values = inner + ((token * CHOSEN + tl.minimum(slot, CHOSEN - 1)) * F)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = coded_product(
        values, slot < CHOSEN, words, scales, rows, inside, read, D,
        F, STEP, STAGES, FORM, True,
    )  # fmt: skip
    # Values of pairs without an expert here may be anything.
    own = slot[None, :] == place[:, None]
    result = tl.sum(tl.where(own, acc, 0.0), 1)
    if bias is not None:
        biases = bias + read * D + column
        result += tl.load(biases, mask=there & (column < D), other=0.0).to(tl.float32)
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
        square = next_squares + token * tl.num_programs(1) + tl.program_id(1)
        tl.store(square, tl.sum(wide * wide, 0))


@triton.jit(do_not_specialize=["P"])
def _coded_sorted_down(
    inner,
    words,
    scales,
    bias,
    order,
    experts,
    out,
    P,
    D: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write N results of each pair of a tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + tl.program_id(0))
    if expert < E:
        matrix = expert.to(tl.int64)
        pairs = tl.load(order + tl.program_id(0) * M + tl.arange(0, M))
        known = pairs < P
        read = tl.where(known, pairs, 0).to(tl.int64)
        columns = tl.program_id(1) * N + tl.arange(0, N)
        rows = tl.minimum(columns, D - 1)
        values = inner + (read * F)[:, None]
        acc = coded_product(
            values, known, words, scales, rows, None, matrix, D,
            F, STEP, STAGES, FORM, M <= 64,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + matrix * D + rows).to(tl.float32)[:, None]
        target = out + (read * D)[None, :] + columns[:, None]
        inside = known[None, :] & (columns < D)[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


def _gate_up(
    x: Tensor,
    chosen: int,
    gate_up: ExpertCodes,
    order: Tensor | None,
    experts: Tensor | None,
    activation: tuple[bool, float | None, float | None],
    configs: CodedConfigs,
    choice: KernelChoice = NO_CHOICE,
) -> Tensor:
    """Return the inner values of all pairs [T * k, F]. order, experts: as the kernel takes them.

    choice: of one row, if its experts are not given.
    """
    (rows, width), c = x.shape, configs.gate_up
    inner_width, pairs = gate_up.num_rows // 2, rows * chosen
    inner = x.new_empty(pairs, inner_width)
    few = next_power_of_2(max(pairs, gate_up.num_experts)) if rows > 1 else 0
    places = pairs if experts is None else len(experts)
    _coded_gate_up[(places, cdiv(inner_width, c.rows // 2))](
        x,
        gate_up.words,
        gate_up.scales,
        gate_up.bias,
        order,
        experts,
        inner,
        pairs,
        *choice,
        width,
        inner_width,
        gate_up.num_experts,
        chosen,
        c.rows // 2,
        configs.pairs,
        few if order is None else 0,
        STEP,
        c.stages,
        gate_up.coding,
        *activation,
        num_warps=c.warps,
        **pdl(x),
    )
    return inner


def multiply_sorted_codes(
    x: Tensor,
    chosen: int,
    tiles: SortedPairs,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    activation: tuple[bool, float | None, float | None],
    configs: CodedConfigs,
) -> Tensor:
    """Return the results of all pairs, [T * k, D]. tiles: of as many as the configurations say."""
    inner = _gate_up(x, chosen, gate_up, tiles.order, tiles.experts, activation, configs)
    (pairs, inner_width), width, c = inner.shape, x.shape[1], configs.down
    results = x.new_empty(pairs, width)
    _coded_sorted_down[(len(tiles.experts), cdiv(width, c.rows))](
        inner,
        down.words,
        down.scales,
        down.bias,
        tiles.order,
        tiles.experts,
        results,
        pairs,
        width,
        inner_width,
        down.num_experts,
        c.rows,
        configs.pairs,
        STEP,
        c.stages,
        down.coding,
        num_warps=c.warps,
        **pdl(x),
    )
    return results


def multiply_few_codes(
    x: Tensor,
    routed: Routed | Undecided,
    out: Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    activation: tuple[bool, float | None, float | None],
    configs: CodedConfigs,
    *,
    add: bool,
    some: bool,
    norm: RmsNorm | None = None,
) -> BegunNorm | None:
    """Write or add what multiply_experts does. activation: `gelu`, alpha and limit of a clamp.

    routed: of one row whose experts are not chosen yet, those that kernels can choose.
    """
    ids, weights = routed if isinstance(routed, Routed) else (None, None)
    choice = kernel_choice(routed) if isinstance(routed, Undecided) else NO_CHOICE
    (rows, width), chosen, inner_width = x.shape, routed.chosen, gate_up.num_rows // 2
    flat = None if ids is None else ids.view(-1)
    inner = _gate_up(x, chosen, gate_up, None, flat, activation, configs, choice)
    c, kept = configs.down, next_power_of_2(chosen)
    columns = max(1, c.rows // kept)
    tiles = cdiv(width, columns)
    begun = room_to_begin(norm, out, tiles)
    _coded_down[(rows, tiles)](
        inner,
        down.words,
        down.scales,
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
        kept,
        columns,
        max(_LEAST, kept),
        STEP,
        c.stages,
        down.coding,
        add,
        begun is not None,
        some,
        num_warps=c.warps,
        **pdl(x),
    )
    return begun
