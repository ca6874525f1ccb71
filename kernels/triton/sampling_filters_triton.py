"""The filters of the sampling kernels: top_k, top_p and min_p over a row, without sorting.

sampling_triton.py says when a row is gathered, and when it is searched as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.triton.sampling_logits_triton import (
    INFINITY,
    LOG2_E,
    NONE,
    from_key,
    load_logits,
    weight_of,
)
from sidestep.kernels.triton.sampling_noise_triton import exponential

_SOME = tl.constexpr(1e-30)
"""Smallest target of top_p, in weight."""

# --- The tokens that may stay


@triton.jit
def count_before(values, count, x, index, best, scale, CHUNK: tl.constexpr):
    """Return the number of `values` before each of x, and their weight.

    x is found at `index` in `values`. A value is before x if it is higher, or as high and at a
    lower index. The results for an x that is not in `values` have no meaning.
    """
    number = tl.zeros(x.shape, tl.int32)
    mass = tl.zeros(x.shape, tl.float32)
    for start in tl.range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)[:, None]
        y = load_logits(values, other, other < count)
        first = (y > x[None, :]) | ((y == x[None, :]) & (other < index[None, :]))
        number += tl.sum(first.to(tl.int32), 0)
        mass += tl.sum(tl.where(first, weight_of(y, best, scale), 0.0), 0)
    return number, mass


@triton.jit
def nucleus_floor(
    scores, masses, tiles, budget, best, scale, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """Return a value below which the tokens surely weigh no more than `budget`, or minus infinity.

    A tile whose best logit is below the value lies below it as a whole. Any other tile has at most
    the mass of all but its best token below it, and at most as much as if all its tokens were just
    below the value. 256 values are tried, e^(1/8) apart in weight.
    """
    floors = best - tl.arange(0, 256) * (0.125 * LOG2_E / scale)
    most = TILE * weight_of(floors, best, scale)
    below = tl.zeros([256], tl.float32)
    for start in tl.range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)[:, None]
        score = tl.load(scores + tile, mask=tile < tiles, other=-INFINITY)
        weight = weight_of(score, best, scale)
        mass = tl.load(masses + tile, mask=tile < tiles, other=0.0) * weight
        rest = tl.minimum(tl.maximum(mass - weight, 0.0), most[None, :])
        below += tl.sum(tl.where(score < floors[None, :], mass, rest), 0)
    return tl.max(tl.where(below <= budget, floors, -INFINITY), 0)


@triton.jit
def gather(
    row,
    values,
    ids,
    tile_list,
    count,
    floor,
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the first CAPACITY logits of the listed tiles that reach `floor`, and their ids.

    Both are written in the order of the ids. Return how many such logits there are in all.
    """
    number = 0
    for start in tl.range(0, count, GROUP):
        index = start + tl.arange(0, GROUP)
        tile = tl.load(tile_list + index, mask=index < count, other=0)
        offsets = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = load_logits(row, offsets, (index < count)[:, None] & (offsets < vocab))
        taken = (x >= floor).to(tl.int32)
        numbers = tl.sum(taken, 1)
        place = number + (tl.cumsum(numbers, 0) - numbers)[:, None] + tl.cumsum(taken, 1) - 1
        fits = (taken != 0) & (place < CAPACITY)
        tl.store(values + place, x, mask=fits)
        tl.store(ids + place, offsets, mask=fits)
        number += tl.sum(numbers, 0)
    return number


# --- The search for a threshold


@triton.jit
def _measures(
    values, count, floors, best, scale, MASS: tl.constexpr, WAYS: tl.constexpr, STEP: tl.constexpr
):
    """Return for each of [WAYS] finite floors the number, or weight, of the logits not below it."""
    sums = tl.zeros([WAYS, STEP], tl.float32)
    for start in tl.range(0, count, STEP):
        offsets = start + tl.arange(0, STEP)[None, :]
        x = load_logits(values, offsets, offsets < count)
        weight = weight_of(x, best, scale) if MASS else 1.0
        sums += tl.where(x >= floors[:, None], weight, 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _threshold(
    values,
    count,
    target,
    low,
    high,
    best,
    scale,
    MASS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the largest key in [low, high) at or above which the measure is `target`, or low.

    Also return the measure above it. No logit is as high as `high`. A sum of fewer of the same
    floats, in the same order, is never larger, so the measures fall from one cut to the next in
    spite of rounding.
    """
    above = 0.0
    while high - low > 1:
        # There are four cuts, some of them equal if there are fewer keys.
        cuts = low + tl.maximum((high - low) * (1 + tl.arange(0, 4)) // 5, 1)
        measures = _measures(values, count, from_key(cuts, LOW_BITS), best, scale, MASS, 4, STEP)
        reached = measures >= target
        low = tl.max(tl.where(reached, cuts, low), 0)
        high = tl.min(tl.where(reached, high, cuts), 0)
        above = tl.maximum(above, tl.max(tl.where(reached, 0.0, measures), 0))
    return low, above


@triton.jit
def _race(
    values,
    ids,
    count,
    threshold,
    room,
    minimum,
    best,
    scale,
    first_key,
    second_key,
    GATHERED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Draw a token among the logits above `threshold` and the first `room` of those that equal it.

    None of them is below `minimum`.
    """
    shortest = tl.full([STEP], INFINITY, tl.float32)
    winner = tl.full([STEP], NONE, tl.int32)
    num_tied = 0
    for start in tl.range(0, count, STEP):
        offsets = start + tl.arange(0, STEP)
        inside = offsets < count
        x = load_logits(values, offsets, inside)
        token = tl.load(ids + offsets, mask=inside, other=0) if GATHERED else offsets
        tied = (inside & (x == threshold)).to(tl.int32)
        before = num_tied + tl.cumsum(tied, 0) - tied
        kept = (
            inside
            & (x >= minimum)
            & ((x > threshold) | ((tied != 0) & (before.to(tl.float32) < room)))
        )
        time = exponential(first_key, second_key, token) * tl.exp2((best - x) * scale)
        faster = kept & ((time < shortest) | (winner == NONE))
        shortest = tl.where(faster, time, shortest)
        winner = tl.where(faster, token, winner)
        num_tied += tl.sum(tied, 0)
    return tl.min(tl.where(shortest == tl.min(shortest, 0), winner, NONE), 0)


@triton.jit
def filter_and_race(
    values,
    ids,
    count,
    low,
    high,
    k,
    p,
    minimum,
    mass,
    best,
    scale,
    race_scale,
    first_key,
    second_key,
    GATHERED: tl.constexpr,
    LOW_BITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Draw a token among those that the filters keep of `count` logits.

    The filters keep no token outside of these. low, high: keys between which the logits lie (high
    is above all). mass: the weight of the whole row. The filters take weights by `scale`, and the
    draw takes them by `race_scale`.
    """
    room = tl.full((), INFINITY, tl.float32)
    if k > 0:
        low, above = _threshold(values, count, k, low, high, best, scale, False, LOW_BITS, STEP)
        room = k - above
        next_up = tl.full([1], 0.0, tl.float32) + from_key(low + 1, LOW_BITS)
        mass = tl.sum(_measures(values, count, next_up, best, scale, True, 1, STEP), 0)
        mass += room * weight_of(from_key(low, LOW_BITS), best, scale)
    if p < 1:
        # The target is never 0, so that the best token stays.
        target = tl.maximum(p * mass, _SOME)
        cut, above = _threshold(values, count, target, low, high, best, scale, True, LOW_BITS, STEP)
        # Among the tokens that weigh as much as this one, those stay whose preceding weight is less
        # than the target.
        fitting = tl.ceil((target - above) / weight_of(from_key(cut, LOW_BITS), best, scale))
        room = tl.where(cut > low, fitting, tl.minimum(fitting, room))
        low = cut
    return _race(
        values,
        ids,
        count,
        from_key(low, LOW_BITS),
        room,
        minimum,
        best,
        race_scale,
        first_key,
        second_key,
        GATHERED,
        STEP,
    )


@triton.jit
def filter_few(
    values,
    ids,
    count,
    k,
    p,
    minimum,
    mass,
    best,
    scale,
    race_scale,
    first_key,
    second_key,
    FEW: tl.constexpr,
):
    """Do the same as filter_and_race for no more than FEW logits, all at once."""
    place = tl.arange(0, FEW)
    kept = place < count
    x = load_logits(values, place, kept)
    token = tl.load(ids + place, mask=kept, other=0)
    number, mass_before = count_before(values, count, x, place, best, scale, 32)
    if k > 0:
        kept = kept & (number < k)
        mass = tl.sum(tl.where(kept, weight_of(x, best, scale), 0.0), 0)
    kept = kept & (x >= minimum)
    if p < 1:
        kept = kept & (mass_before < tl.maximum(p * mass, _SOME))
    time = exponential(first_key, second_key, token) * tl.exp2((best - x) * race_scale)
    time = tl.where(kept, time, INFINITY)
    return tl.min(tl.where(kept & (time == tl.min(time, 0)), token, NONE), 0)
