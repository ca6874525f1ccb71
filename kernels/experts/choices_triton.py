"""The choice of experts in Triton, from a router's whole product or from parts of it.

The reference is in kernels/ops/routing.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import completes, opens_early
from sidestep.kernels.ops.routing import TINY, Routed, Undecided

_MANY_ROWS, _TOGETHER = 4096, 4
"""Tokens from which a program chooses for several, and for how many: a processor holds 32 programs,
and 64 warps. Each warp has a token."""
MOST_EXPERTS, STEP = 128, 64
"""Experts of which a program may have the whole product, and inputs of its steps."""
_TILE = 32, 64, 4
"""The least experts of such a program, its tokens and its warps."""


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


@triton.jit
def whole_product(
    x, weight, rows, experts, T, D: tl.constexpr, E: tl.constexpr, STEP: tl.constexpr
):
    """Return the product of some rows of x and experts' weights, STEP inputs at a time."""
    tokens = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * D
    readable = weight + tl.minimum(experts, E - 1)[:, None] * D
    acc = tl.zeros([rows.shape[0], experts.shape[0]], tl.float32)
    for at in range(0, D, STEP):
        inputs = (at + tl.arange(0, STEP))[None, :]
        value = tl.load(tokens + inputs, mask=inputs < D, other=0.0)
        w = tl.load(readable + inputs, mask=inputs < D, other=0.0)
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    return acc


@opens_early
@completes("ids")
@triton.jit(do_not_specialize=["T", "first"])
def _choose_experts(
    source,
    weight,
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
    WIDE: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of ROWS rows.

    source: the parts of the product, [PARTS, T, WIDE]; or with `weight`, inputs [T, WIDE] that are
    multiplied here, STEP of them at a time. JOINED: whether a row also has the expert with the
    number E. GATED: whether the product has a gate of that one behind the experts' logits.
    """
    if PDL:
        # Where the pairs are sorted next, the kernel behind asks for matrices before its own wait.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (rows < T)[:, None]
    experts = tl.arange(0, WIDTH)[None, :]
    known = experts < E
    gate = tl.zeros([ROWS], tl.float32)
    if weight is not None:
        acc = whole_product(source, weight, rows, tl.arange(0, WIDTH), T, WIDE, E, STEP)
    else:
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for part in tl.static_range(PARTS):
            own = source + (tl.full([], part, tl.int64) * T + rows) * WIDE
            acc += tl.load(own[:, None] + experts, mask=known & there, other=0.0)
            if GATED:
                gate += tl.load(own + E, mask=rows < T, other=0.0)
    if product_bias is not None:
        acc += tl.load(product_bias + experts, mask=known, other=0.0)
    nothing = float("-inf")
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-acc))
    else:
        logits = tl.where(known, acc, nothing)
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + experts, mask=known, other=0.0)
    ranked = tl.where(known, ranked, nothing)
    if BEST < GROUPS:
        ranked = _of_best_groups(ranked, tl.arange(0, WIDTH), E // GROUPS, GROUPS, BEST)
    # A reduction of integers is one instruction. So a score's bits are brought into their order.
    # Zeros have one sign.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    places = tl.arange(0, KEPT)[None, :]
    kept = tl.zeros([ROWS, KEPT], tl.float32)
    found = tl.zeros([ROWS, KEPT], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(keys, 1)
        # A graph's padding may be NaN. It must still name an expert.
        index = tl.min(tl.where(keys == best[:, None], experts, WIDTH), 1)
        index = tl.minimum(index, E - 1)[:, None]
        if BIAS or BEST < GROUPS:
            score = tl.sum(tl.where(experts == index, scores, 0.0), 1)
        else:
            # A score by which an expert is chosen is not negative: its bits are in their order.
            score = best.to(tl.float32, bitcast=True)
        total += score
        kept = tl.where(places == place, score[:, None], kept)
        found = tl.where(places == place, index, found)
        keys = tl.where(experts == index, -0x80000000, keys)
    if NORMALISED:
        kept = kept / (total[:, None] + tiny)
    if OWN < E:
        found -= first
        found = tl.where((found >= 0) & (found < OWN), found, -1)
    kept *= scale
    if JOINED:
        found = tl.where(places == CHOSEN, E, found)
        share = 1.0 / (1.0 + tl.exp(-gate))[:, None] if GATED else 1.0
        kept = tl.where(places == CHOSEN, share, kept)
    target = rows.to(tl.int64)[:, None] * (CHOSEN + JOINED) + places
    tl.store(weights + target, kept, mask=there & (places < CHOSEN + JOINED))
    tl.store(ids + target, found, mask=there & (places < CHOSEN + JOINED))


def decided(routed: Routed | Undecided) -> Routed:
    """Choose the experts of rows where they are not chosen yet."""
    if isinstance(routed, Routed):
        return routed
    parts, experts, choice, bias, product_bias, own, joined, weight = routed
    num_parts, rows, wide = parts.shape
    ids = parts.new_empty(rows, routed.chosen, dtype=torch.int32)
    made = Routed(ids, torch.empty_like(ids, dtype=torch.float32))
    if rows == 0:
        return made
    least, at_once, warps = 1, 1, 1
    if weight is not None:
        least, at_once, warps = _TILE
    elif rows >= _MANY_ROWS:
        at_once = warps = _TOGETHER
    _choose_experts[(cdiv(rows, at_once),)](
        parts,
        weight,
        parts if bias is None else bias,
        product_bias,
        *made,
        rows,
        own.start,
        float(choice.scale),
        TINY,
        num_parts,
        experts,
        wide,
        choice.num_chosen,
        choice.sigmoid,
        choice.normalised,
        joined is not None,
        joined is not None and joined.gated,
        bias is not None,
        choice.groups,
        choice.chosen_groups,
        len(own),
        max(least, next_power_of_2(experts)),
        next_power_of_2(routed.chosen),
        at_once,
        STEP,
        num_warps=warps,
        num_stages=4,
        **pdl(parts),
    )
    return made
