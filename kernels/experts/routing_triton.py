"""The router of a mixture of experts in Triton: its product in float32, and the choice.

The product's inputs are shared out among programs. The kernel that chooses adds their parts, always
in the same order.

The reference of the choice is in kernels/ops/routing.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.routing import TINY, Choice, Routed

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Tokens of a program of the product. 16 are the fewest that the tensor cores multiply."""
_COLUMNS, _STEP = 32, 256
"""Experts and inputs of such a program, which loads all its numbers at once. Where a few programs
looped over them, a step of one row waited for the memory 32 times a layer."""


@triton.jit
def _of_best_groups(ranked, experts, SIZE: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr):
    """Return the scores of the best groups' experts, and -inf for all others."""
    group_of = experts // SIZE
    nothing = float("-inf")
    sums = tl.full(ranked.shape, nothing, tl.float32)
    for group in range(GROUPS):
        own = tl.where((group_of == group)[None, :], ranked, nothing)
        first = tl.max(own, 1)
        if SIZE > 1:
            index = tl.min(tl.where(own == first[:, None], experts[None, :], 1 << 30), 1)
            own = tl.where(experts[None, :] == index[:, None], nothing, own)
            first += tl.max(own, 1)
        sums = tl.where((group_of == group)[None, :], first[:, None], sums)
    kept = tl.full(ranked.shape, nothing, tl.float32)
    for _ in range(BEST):
        most = tl.max(sums, 1)
        index = tl.min(tl.where(sums == most[:, None], experts[None, :], 1 << 30), 1)
        chosen = group_of[None, :] == (index // SIZE)[:, None]
        kept = tl.where(chosen, ranked, kept)
        sums = tl.where(chosen, nothing, sums)
    return kept


@triton.jit(do_not_specialize=["T"])
def _router_product(
    x,
    weight,
    parts,
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a part of the product in float32, that of STEP inputs: parts [D / STEP, T, E]."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    experts = tl.program_id(1) * N + tl.arange(0, N)
    steps = tl.program_id(2) * STEP + tl.arange(0, STEP)
    inside = (steps < D)[None, :]
    readable = tl.minimum(experts, E - 1)[:, None]
    w = tl.load(weight + readable * D + steps[None, :], mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.minimum(rows, T - 1).to(tl.int64)[:, None]
    value = tl.load(x + tokens * D + steps[None, :], mask=inside, other=0.0)
    product = tl.dot(value, w.T, input_precision="ieee")
    target = parts + (tl.program_id(2).to(tl.int64) * T + rows[:, None]) * E + experts[None, :]
    tl.store(target, product, mask=(rows < T)[:, None] & (experts < E)[None, :])


@triton.jit(do_not_specialize=["T", "first"])
def _choose_experts(
    parts,
    bias,
    product_bias,
    ids,
    weights,
    T,
    first,
    scale,
    tiny,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of a row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    known = experts < E
    acc = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(
            parts + (tl.full([], part, tl.int64) * T + row) * E + experts, mask=known, other=0.0
        )
    if product_bias is not None:
        acc += tl.load(product_bias + experts, mask=known, other=0.0)
    nothing = float("-inf")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-acc))
    else:
        logits = tl.where(known, acc, nothing)
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + experts, mask=known, other=0.0)
    ranked = tl.where(known, ranked, nothing)
    if BEST < GROUPS:
        ranked = _of_best_groups(ranked[None, :], experts, E // GROUPS, GROUPS, BEST)
        ranked = ranked.reshape(WIDTH)
    # One reduction finds the best score and the lowest index that has it: the score's bits, in an
    # order of integers, lie over the index, from the last one down. Zeros have one sign.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (WIDTH - 1 - experts).to(tl.int64)
    places = tl.arange(0, KEPT)
    kept = tl.zeros([KEPT], tl.float32)
    found = tl.zeros([KEPT], tl.int32)
    total = 0.0
    for place in tl.static_range(CHOSEN):
        best = tl.max(keys, 0)
        # A graph's padding may be NaN. It must still name an expert.
        index = tl.minimum(WIDTH - 1 - (best & 0xFFFFFFFF).to(tl.int32), E - 1)
        score = tl.sum(tl.where(experts == index, scores, 0.0), 0)
        total += score
        kept = tl.where(places == place, score, kept)
        found = tl.where(places == place, index, found)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
    if NORMALISED:
        kept = kept / (total + tiny)
    if OWN < E:
        found -= first
        found = tl.where((found >= 0) & (found < OWN), found, -1)
    target = row.to(tl.int64) * CHOSEN + places
    tl.store(weights + target, kept * scale, mask=places < CHOSEN)
    tl.store(ids + target, found, mask=places < CHOSEN)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice: Choice,
    own: range | None = None,
    product_bias: Tensor | None = None,
) -> Routed:
    """Return the experts of each row of x [T, D], contiguous.

    weight: [E, D] in x's type. bias: float32 [E], added to the scores for the choice. own: this
    rank's experts, from which they are numbered; None for all. product_bias: float32 [E], added to
    the product with the weight.
    """
    rows, width = x.shape
    experts = weight.shape[0]
    own = range(experts) if own is None else own
    routed = Routed(
        x.new_empty(rows, choice.num_chosen, dtype=torch.int32),
        x.new_empty(rows, choice.num_chosen, dtype=torch.float32),
    )
    if rows == 0:
        return routed
    at_once = _FEW_ROWS if rows <= 4 * _FEW_ROWS else _MANY_ROWS
    num_parts, kind = triton.cdiv(width, _STEP), pdl(x)
    parts = x.new_empty(num_parts, rows, experts, dtype=torch.float32)
    grid = triton.cdiv(rows, at_once), triton.cdiv(experts, _COLUMNS), num_parts
    _router_product[grid](
        x, weight, parts, rows, width, experts, at_once, _COLUMNS, _STEP, num_warps=4, **kind
    )
    _choose_experts[(rows,)](
        parts,
        weight if bias is None else bias,
        product_bias,
        routed.ids,
        routed.weights,
        rows,
        own.start,
        float(choice.scale),
        TINY,
        num_parts,
        experts,
        choice.num_chosen,
        choice.sigmoid,
        choice.normalised,
        bias is not None,
        choice.groups,
        choice.chosen_groups,
        len(own),
        triton.next_power_of_2(experts),
        triton.next_power_of_2(choice.num_chosen),
        num_warps=1,
        **kind,
    )
    return routed
