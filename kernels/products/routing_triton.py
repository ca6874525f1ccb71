"""The router of a mixture of experts in Triton: its product in float32, and the choice.

The reference of the choice is in kernels/ops/routing.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.routing import TINY, Choice, Routed

_ROWS = 16
"""Tokens of a program: the fewest that the tensor cores multiply."""


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


@triton.jit(do_not_specialize=["T", "first"])
def _route(
    x,
    weight,
    bias,
    product_bias,
    ids,
    weights,
    T,
    first,
    scale,
    tiny,
    D: tl.constexpr,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    OWN: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * M + tl.arange(0, M)
    readable = tl.minimum(rows, T - 1).to(tl.int64)
    experts = tl.arange(0, WIDTH)
    known = (experts < E)[None, :]
    acc = tl.zeros([M, WIDTH], tl.float32)
    for at in range(0, D, STEP):
        steps = at + tl.arange(0, STEP)
        inside = (steps < D)[None, :]
        value = tl.load(x + readable[:, None] * D + steps[None, :], mask=inside, other=0.0)
        matrix = weight + tl.minimum(experts, E - 1)[:, None] * D + steps[None, :]
        w = tl.load(matrix, mask=inside, other=0.0)
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    if product_bias is not None:
        acc += tl.load(product_bias + experts, mask=experts < E, other=0.0)[None, :]
    nothing = float("-inf")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-acc))
    else:
        logits = tl.where(known, acc, nothing)
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + experts, mask=experts < E, other=0.0)[None, :]
    ranked = tl.where(known, ranked, nothing)
    if BEST < GROUPS:
        ranked = _of_best_groups(ranked, experts, E // GROUPS, GROUPS, BEST)
    places = tl.arange(0, KEPT)[None, :]
    kept = tl.zeros([M, KEPT], tl.float32)
    found = tl.zeros([M, KEPT], tl.int32)
    total = tl.zeros([M], tl.float32)
    for place in range(CHOSEN):
        best = tl.max(ranked, 1)
        index = tl.min(tl.where(ranked == best[:, None], experts[None, :], WIDTH), 1)
        # A graph's padding may be NaN, which equals nothing. It must still name an expert.
        index = tl.minimum(index, E - 1)
        chosen = experts[None, :] == index[:, None]
        score = tl.sum(tl.where(chosen, scores, 0.0), 1)
        total += score
        kept = tl.where(places == place, score[:, None], kept)
        found = tl.where(places == place, index[:, None], found)
        ranked = tl.where(chosen, nothing, ranked)
    if NORMALISED:
        kept = kept / (total + tiny)[:, None]
    if OWN < E:
        found -= first
        found = tl.where((found >= 0) & (found < OWN), found, -1)
    target = rows[:, None].to(tl.int64) * CHOSEN + places
    inside = (rows < T)[:, None] & (places < CHOSEN)
    tl.store(weights + target, kept * scale, mask=inside)
    tl.store(ids + target, found, mask=inside)


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
    padded = max(16, triton.next_power_of_2(experts))
    _route[(triton.cdiv(rows, _ROWS),)](
        x,
        weight,
        weight if bias is None else bias,
        product_bias,
        routed.ids,
        routed.weights,
        rows,
        own.start,
        float(choice.scale),
        TINY,
        width,
        experts,
        choice.num_chosen,
        choice.sigmoid,
        choice.normalised,
        bias is not None,
        choice.groups,
        choice.chosen_groups,
        len(own),
        _ROWS,
        padded,
        triton.next_power_of_2(choice.num_chosen),
        min(64, max(16, 16384 // (padded * x.element_size()))),
        num_warps=4 if padded <= 128 else 8,
        **pdl(x),
    )
    return routed
