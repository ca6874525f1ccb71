"""The choice of a row's experts within other kernels, in Triton.

A kernel that chooses for itself need not wait for one that does. Logits are kept in groups of 32,
one for each thread of a warp, so that all warps choose alike and none waits for another. They are
compared as integers: the bits of a float are in its order, those of negative ones in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.ops.routing import TINY, Undecided

_GROUP = tl.constexpr(32)
_LEAST = tl.constexpr(-0x80000000)
"""Less than every number's bits: of experts that are not there or already taken."""
_NOWHERE = tl.constexpr(1 << 30)
_GROUPS = 4


@triton.jit
def _ordered(parts, bias, row, lane, FIRST: tl.constexpr, PARTS: tl.constexpr, T, E, WIDE):
    """Return the logits of a group of experts in the order of integers."""
    experts = FIRST + lane
    if FIRST >= E:
        return lane * 0 + _LEAST
    else:
        acc = lane.to(tl.float32) * 0.0
        for part in tl.static_range(PARTS):
            own = parts + (T.to(tl.int64) * part + row) * WIDE
            acc += tl.load(own + experts, mask=experts < E, other=0.0)
        if bias is not None:
            acc += tl.load(bias + experts, mask=experts < E, other=0.0)
        bits = (acc + 0.0).to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return tl.where(experts < E, ordered, _LEAST)


@triton.jit
def row_keys(parts, bias, row, lane, T, PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    """Return the logits of a row in the order of integers: four groups of experts."""
    return (
        _ordered(parts, bias, row, lane, 0, PARTS, T, E, WIDE),
        _ordered(parts, bias, row, lane, 32, PARTS, T, E, WIDE),
        _ordered(parts, bias, row, lane, 64, PARTS, T, E, WIDE),
        _ordered(parts, bias, row, lane, 96, PARTS, T, E, WIDE),
    )


@triton.jit
def best_key(a, b, c, d, lane):
    """Return the greatest key, and the lowest index that has it."""
    most = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 0)
    first = tl.where(d == most, lane + 96, _NOWHERE)
    first = tl.where(c == most, lane + 64, first)
    first = tl.where(b == most, lane + 32, first)
    first = tl.where(a == most, lane, first)
    return most, tl.min(first, 0)


@triton.jit
def without(keys, index, lane, FIRST: tl.constexpr):
    """Return the keys of the group from FIRST on without that of the expert `index`."""
    return tl.where(lane + FIRST == index, _LEAST, keys)


@triton.jit
def _number(key):
    """Return the float of a key; of none, NaN."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _power(keys, most):
    """Return exp(logit - most), and 0 for experts that are not there."""
    return tl.where(keys == _LEAST, 0.0, tl.exp(_number(keys) - most))


@triton.jit
def chosen_expert(
    parts, bias, row, place, lane, T, PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr
):
    """Return the expert of a row that has a place among those chosen. lane: 0 to 31, [32]."""
    a, b, c, d = row_keys(parts, bias, row, lane, T, PARTS, E, WIDE)
    _, index = best_key(a, b, c, d, lane)
    for _ in range(place):
        a, b = without(a, index, lane, 0), without(b, index, lane, 32)
        c, d = without(c, index, lane, 64), without(d, index, lane, 96)
        _, index = best_key(a, b, c, d, lane)
    return index


@triton.jit
def chosen_experts(
    parts,
    bias,
    row,
    places,
    lane,
    T,
    scale,
    tiny,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Return the experts of a row that have these places, and their weights.

    lane: 0 to 31, [32].
    """
    a, b, c, d = row_keys(parts, bias, row, lane, T, PARTS, E, WIDE)
    key, index = best_key(a, b, c, d, lane)
    most = _number(key)
    powers = _power(a, most) + _power(b, most) + _power(c, most) + _power(d, most)
    every = tl.sum(powers, 0)
    found = places * 0
    weights = places.to(tl.float32) * 0.0
    total = 0.0
    for place in tl.static_range(CHOSEN):
        if place > 0:
            a, b = without(a, index, lane, 0), without(b, index, lane, 32)
            c, d = without(c, index, lane, 64), without(d, index, lane, 96)
            key, index = best_key(a, b, c, d, lane)
        score = tl.exp(_number(key) - most) / every
        total += score
        found = tl.where(places == place, index, found)
        weights = tl.where(places == place, score, weights)
    if NORMALISED:
        weights = weights / (total + tiny)
    return found, weights * scale


class KernelChoice(NamedTuple):
    """The arguments with which kernels choose; all None or 0 where experts are chosen already."""

    parts: Tensor | None = None
    bias: Tensor | None = None
    rows: int = 0
    scale: float = 1.0
    tiny: float = TINY
    num_parts: int = 0
    experts: int = 0
    wide: int = 0
    normalised: bool = False


NO_CHOICE = KernelChoice()


def by_softmax_of_all(undecided: Undecided) -> bool:
    """Return whether experts are chosen by a softmax of all of them, and all are here."""
    choice = undecided.choice
    return (
        len(undecided.own) == undecided.experts
        and undecided.bias is None
        and not choice.sigmoid
        and choice.chosen_groups == choice.groups
    )


def chosen_in_kernels(undecided: Undecided) -> bool:
    """Return whether kernels in Triton can choose: by a softmax of not too many experts."""
    few = undecided.experts <= _GROUPS * _GROUP.value
    return few and undecided.joined is None and by_softmax_of_all(undecided)


def kernel_choice(undecided: Undecided) -> KernelChoice:
    """Return how kernels choose."""
    assert undecided.weight is None, "parts of the product are needed"
    num_parts, rows, wide = undecided.parts.shape
    choice = undecided.choice
    return KernelChoice(
        undecided.parts,
        undecided.product_bias,
        rows,
        float(choice.scale),
        TINY,
        num_parts,
        undecided.experts,
        wide,
        choice.normalised,
    )
