"""The products of coded experts for a few pairs of a token and an expert, from registers.

The kernels are for steps in which reading and decoding the experts is all the time. Weights come
straight into registers (kernels/quantized/turns_gluon.py):

- Warps share out the columns of a matrix, or a token's experts. They meet once, at the end.
- The second operand's columns are the inputs of an expert's pairs, so that it is read and decoded
  once for up to eight of them. The last product has inner values of one pair a warp.
- The last product's programs load their first weights before they wait for the inner values; those
  of one row all of them, which go to shared memory.

A column of the tensor cores' result does not depend on the others, so a token's bits depend on that
token alone. They are for Hopper and later: coded_pairs_triton.py does the same for all GPUs and
forms.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sidestep.kernels.experts.common.choice_triton import (
    NO_CHOICE,
    chosen_expert,
    kernel_choice,
    token_experts,
)
from sidestep.kernels.experts.common.expert_activation_triton import gated
from sidestep.kernels.experts.common.experts_config import RegisterConfigs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import reads_early
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, room_to_begin
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.device_matrix import STEP
from sidestep.kernels.quantized.turns_gluon import (
    ask_first,
    ask_for_line,
    inputs_are_there,
    keep_turns,
    kept_words_layout,
    products_of_warps,
    same_columns,
    sum_of_kept,
    sum_of_turns,
    words_in_step,
    words_of_warps,
)

# Triton 3.9 has this by another name than 3.6.
_load = getattr(
    async_copy,
    "async_load" if hasattr(async_copy, "async_load") else "async_copy_global_to_shared",
)

PAIRS = 8
"""Pairs of an expert that share a program: columns of the second operand."""
_NOWHERE = gl.constexpr(1 << 30)
_ROWS = gl.constexpr(16)
"""Rows that the tensor cores take of a warp."""
_MOST_REGISTERS = {"mxfp4": 128}
"""Kind of codes -> registers of a thread, where more would leave a processor fewer programs."""


@gluon.jit
def _ask_for_columns(kept, x, inside, turn, K: gl.constexpr):
    """Copy a turn's inputs of several pairs to shared memory, [warps, 8, 128].

    x: the address of each pair's first input [8]. inside: which pairs there are; others get 0.
    """
    WARPS: gl.constexpr = kept.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = (turn * WARPS + warp[:, None, None]) * 128 + place[None, None, :]
    there = inside[None, :, None] & (column < K)
    _load(kept, x[None, :, None] + column, mask=there)


@gluon.jit(do_not_specialize=["P", "T"])
def _register_gate_up(
    x,
    words,
    scales,
    bias,
    experts,
    out,
    P,
    parts,
    logit_bias,
    T,
    scale,
    tiny,
    PARTS: gl.constexpr,
    LOGITS: gl.constexpr,
    WIDE: gl.constexpr,
    NORMALISED: gl.constexpr,
    JOINED: gl.constexpr,
    GATED: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    E: gl.constexpr,
    CHOSEN: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    GELU: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write ROWS / 2 inner values of an expert's pairs; warps share out the columns.

    WIDTH: at least P, or 0 for one token, whose pairs have an expert each. PARTS: as in
    KernelChoice; 0 if the experts are given. A token by itself may choose.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    WORDS: gl.constexpr = words_in_step(FORM[0])
    STEPS: gl.constexpr = (D + 127) // 128
    GROUPS: gl.constexpr = (D + FORM[2] - 1) // FORM[2] if FORM[2] > 0 else 1
    N: gl.constexpr = num_warps * ROWS
    BY_ROW: gl.constexpr = gl.SliceLayout(1, words_of_warps(ROWS, num_warps, WORDS))
    INPUTS: gl.constexpr = gl.SliceLayout(
        0,
        gl.SliceLayout(2, gl.BlockedLayout([1, 1, 8], [1, 2, 16], [num_warps, 1, 1], [2, 1, 0])),
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [num_warps, 1], [1, 0])
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    place = gl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS > 0:
        expert = chosen_expert(parts, logit_bias, 0, place, lane, T, PARTS, LOGITS, WIDE, JOINED)
    else:
        expert = gl.load(experts + place)
    # Programs of experts that are not here do nothing.
    if (expert < 0) | (expert >= E):
        return
    # 1. Ask for the first weights.
    row = gl.arange(0, N, layout=BY_ROW)
    column = gl.program_id(1) * (ROWS // 2) + row % ROWS // 16 * 8 + row % 8
    half = row % 16 // 8
    matrix = expert.to(gl.int64)
    rows = gl.minimum(column, F - 1) + half * F
    per_group: gl.constexpr = 2 * F // FORM[1]
    source = (matrix * (2 * F) + rows) * (STEPS * WORDS)
    own = scales + matrix * (GROUPS * per_group) + rows // FORM[1]
    first = row // ROWS
    at = words, source, own, first, per_group
    asked = ask_first(at, num_warps, STEPS, STAGES, FORM)
    # 2. Find the expert's pairs, and copy their inputs to shared memory.
    out_slot = gl.arange(0, 8, layout=gl.SliceLayout(0, OUT))
    out_pair = gl.where(out_slot == 0, place, -1)
    if WIDTH == 0:
        kept = gl.allocate_shared_memory(
            dtype, [TURNS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        for turn in gl.static_range(TURNS):
            ask_for_line(kept.index(turn), x, num_warps, 1, num_warps, turn, D)
    else:
        EVERY: gl.constexpr = gl.BlockedLayout([WIDTH // 32], [32], [num_warps], [0])
        every = gl.arange(0, WIDTH, layout=EVERY)
        same = gl.load(experts + every, mask=every < P, other=-2) == expert
        before = gl.sum((same & (every < place)).to(gl.int32), 0)
        # Each program takes eight pairs, and that of one of the others has nothing to do.
        if before % 8 != 0:
            return
        slot = gl.arange(0, 8, layout=INPUTS)
        pair = gl.where(slot == 0, place, -1)
        found = place
        for index in gl.static_range(1, 8):
            found = gl.min(gl.where(same & (every > found), every, _NOWHERE), 0)
            here = gl.where(found < P, found, -1)
            pair = gl.where(slot == index, here, pair)
            out_pair = gl.where(out_slot == index, here, out_pair)
        kept = gl.allocate_shared_memory(
            dtype, [TURNS, num_warps, 8, 128], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        )
        values = x + gl.maximum(pair, 0).to(gl.int64) // CHOSEN * D
        for turn in gl.static_range(TURNS):
            _ask_for_columns(kept.index(turn), values, pair >= 0, turn, D)
    inputs_are_there()
    # 3. Multiply.
    acc = gl.zeros([num_warps, ROWS, 8], gl.float32, products_of_warps(num_warps))
    acc = sum_of_turns(acc, at, asked, kept, num_warps, STEPS, TURNS, STAGES, FORM, True)
    # 4. Add the warps' shares, and activate.
    both = gl.sum(acc, 0).reshape(ROWS // 16, 2, 8, 8).permute(0, 2, 3, 1).reshape(ROWS // 2, 8, 2)
    gate, up = both.split()
    gate, up = gl.convert_layout(gate, OUT), gl.convert_layout(up, OUT)
    columns = gl.program_id(1) * (ROWS // 2) + gl.arange(
        0, ROWS // 2, layout=gl.SliceLayout(1, OUT)
    )
    if bias is not None:
        given = bias + matrix * (2 * F) + gl.minimum(columns, F - 1)
        gate += gl.load(given).to(gl.float32)[:, None]
        up += gl.load(given + F).to(gl.float32)[:, None]
    activated = gated(gate, up, dtype, GELU, ALPHA, LIMIT).to(dtype)
    target = out + (gl.maximum(out_pair, 0).to(gl.int64) * F)[None, :] + columns[:, None]
    gl.store(target, activated, mask=(out_pair >= 0)[None, :] & (columns < F)[:, None])


@reads_early("ids", "parts")
@gluon.jit(do_not_specialize=["T"])
def _register_down(
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
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
    WAITS: gl.constexpr,
    FORM: gl.constexpr,
    ADD: gl.constexpr,
    NEXT: gl.constexpr,
    SOME: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Add 16 outputs of all experts of a token, each of which has warps of its own.

    PARTS: as in KernelChoice; 0 if the ids and weights are given. NEXT: whether to begin the next
    norm too.
    """
    dtype: gl.constexpr = inner.dtype.element_ty
    WORDS: gl.constexpr = words_in_step(FORM[0])
    STEPS: gl.constexpr = (F + 127) // 128
    GROUPS: gl.constexpr = (F + FORM[2] - 1) // FORM[2] if FORM[2] > 0 else 1
    SPLIT: gl.constexpr = num_warps // KEPT
    N: gl.constexpr = num_warps * 16
    MMA: gl.constexpr = products_of_warps(num_warps)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, words_of_warps(16, num_warps, WORDS))
    SUMS: gl.constexpr = gl.SliceLayout(2, MMA)
    LINES: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    )
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    lane = gl.arange(0, 32, layout=OUT)
    token = gl.program_id(0).to(gl.int64)
    # 1. Ask for the first weights. The kernel before waited for the ids or logits, so they are
    # there.
    row = gl.arange(0, N, layout=BY_ROW)
    place = row // (16 * SPLIT)
    taken = gl.minimum(place, CHOSEN - 1)
    expert, share = token_experts(
        ids, weights, parts, logit_bias, taken, lane, T, scale, tiny,
        PARTS, E, WIDE, NORMALISED, JOINED, GATED, CHOSEN,
    )  # fmt: skip
    there = place < CHOSEN
    if SOME:
        there = there & (expert >= 0)
    matrix = gl.where(there, expert, 0).to(gl.int64)
    column = gl.program_id(1) * 16 + row % 16
    rows = gl.minimum(column, D - 1)
    per_group: gl.constexpr = D // FORM[1]
    source = (matrix * D + rows) * (STEPS * WORDS)
    own = scales + matrix * (GROUPS * per_group) + rows // FORM[1]
    first = row // 16 % SPLIT
    at = words, source, own, first, per_group
    if WAITS:
        memory = gl.allocate_shared_memory(gl.int32, [TURNS, N, WORDS], kept_words_layout(WORDS))
        asked = keep_turns(at, (source, first), memory, SPLIT, STEPS, TURNS, FORM)
    else:
        asked = ask_first(at, SPLIT, STEPS, STAGES, FORM)
    if bias is not None:
        given = gl.load(bias + matrix * D + rows).to(gl.float32)
        biases = gl.where(first == 0, given, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # 2. Copy the inner values to shared memory. Each warp has those of its pair and columns.
    kept = gl.allocate_shared_memory(
        dtype, [TURNS, num_warps, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    warp = gl.arange(0, num_warps, layout=LINES)
    pair = token * CHOSEN + gl.minimum(warp // SPLIT, CHOSEN - 1)
    for turn in gl.static_range(TURNS):
        ask_for_line(kept.index(turn), inner, SPLIT, 1, SPLIT, turn, F, pair * F)
    columns = gl.program_id(1) * 16 + gl.arange(0, 16, layout=OUT)
    target = out + token * D + columns
    if ADD:
        total = gl.load(target, mask=columns < D, other=0.0).to(gl.float32)
    if NEXT:
        norm = gl.load(next_norm + columns, mask=columns < D, other=0.0).to(gl.float32)
    inputs_are_there()
    # 3. Multiply.
    acc = gl.zeros([num_warps, 16, 8], gl.float32, MMA)
    if WAITS:
        acc = sum_of_kept(acc, at, asked, memory, kept, TURNS, FORM, True)
    else:
        acc = sum_of_turns(acc, at, asked, kept, SPLIT, STEPS, TURNS, STAGES, FORM, True)
    # 4. Weigh the experts and add them. Values of pairs without an expert here may be anything.
    sums = same_columns(acc)
    if bias is not None:
        sums += gl.convert_layout(biases.reshape(num_warps, 16), SUMS)
    sums *= gl.convert_layout(share.reshape(num_warps, 16), SUMS)
    sums = gl.where(gl.convert_layout(there.reshape(num_warps, 16), SUMS), sums, 0.0)
    added = gl.convert_layout(gl.sum(sums, 0), OUT)
    if ADD:
        added += total
    rounded = added.to(dtype)
    gl.store(target, rounded, mask=columns < D)
    if NEXT:
        wide = gl.where(columns < D, rounded.to(gl.float32), 0.0)
        gl.store(next_weighted + token * D + columns, (wide * norm).to(dtype), mask=columns < D)
        squares = gl.sum((wide * wide).reshape(2, 8), 1)
        half = gl.arange(0, 2, layout=squares.type.layout)
        place = (token * gl.num_programs(1) + gl.program_id(1)) * 2 + half
        gl.store(next_squares + place, squares)


def multiply_from_registers(
    x: Tensor,
    routed: Routed | Undecided,
    out: Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    activation: tuple[bool, float | None, float | None],
    configs: RegisterConfigs,
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
    inner, c = x.new_empty(rows * chosen, inner_width), configs.gate_up
    turns = cdiv(cdiv(width, STEP), c.warps)
    pairs = rows * chosen
    _register_gate_up[(pairs, cdiv(inner_width, configs.rows // 2))](
        x,
        gate_up.words,
        gate_up.scales,
        gate_up.bias,
        ids,
        inner,
        pairs,
        *choice,
        width,
        inner_width,
        gate_up.num_experts,
        chosen,
        configs.rows,
        next_power_of_2(max(pairs, gate_up.num_experts, 32)) if rows > 1 else 0,
        turns,
        min(c.stages, turns),
        gate_up.coding,
        *activation,
        num_warps=c.warps,
        maxnreg=_MOST_REGISTERS.get(gate_up.coding.kind),
        **pdl(x),
    )
    c, kept = configs.down, next_power_of_2(chosen)
    split = max(1, c.warps // kept)
    turns = cdiv(cdiv(inner_width, STEP), split)
    tiles = cdiv(width, _ROWS.value)
    begun = room_to_begin(norm, out, 2 * tiles)
    _register_down[(rows, tiles)](
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
        turns,
        min(c.stages, turns),
        c.waits,
        down.coding,
        add,
        begun is not None,
        some,
        num_warps=kept * split,
        maxnreg=_MOST_REGISTERS.get(down.coding.kind),
        **pdl(x),
    )
    return begun
