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
_MOST_EXPERTS = 256


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
def _and(keys, group):
    """Return the keys with those of one more group."""
    return keys + (group,)


@triton.jit
def row_keys(parts, bias, row, lane, T, PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    """Return the logits of a row in the order of integers, a tensor for each group of experts."""
    keys = (_ordered(parts, bias, row, lane, 0, PARTS, T, E, WIDE),)
    for first in tl.static_range(_GROUP, E, _GROUP):
        keys = _and(keys, _ordered(parts, bias, row, lane, first, PARTS, T, E, WIDE))
    return keys


@triton.jit
def best_key(keys, lane):
    """Return the greatest key, and the lowest index that has it."""
    greatest = keys[0]
    for group in tl.static_range(1, len(keys)):
        greatest = tl.maximum(greatest, keys[group])
    most = tl.max(greatest, 0)
    first = lane * 0 + _NOWHERE
    for group in tl.static_range(len(keys) - 1, -1, -1):
        first = tl.where(keys[group] == most, lane + group * _GROUP, first)
    return most, tl.min(first, 0)


@triton.jit
def without(keys, index, lane):
    """Return the keys without that of the expert `index`."""
    left = (tl.where(lane == index, _LEAST, keys[0]),)
    for group in tl.static_range(1, len(keys)):
        left = _and(left, tl.where(lane + group * _GROUP == index, _LEAST, keys[group]))
    return left


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
    parts,
    bias,
    row,
    place,
    lane,
    T,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Return the expert of a row that has a place among those chosen.

    lane: 0 to 31, [32]. JOINED: see KernelChoice.
    """
    keys = row_keys(parts, bias, row, lane, T, PARTS, E, WIDE)
    _, index = best_key(keys, lane)
    for _ in range(tl.where(place == JOINED, 0, place) if JOINED > 0 else place):
        keys = without(keys, index, lane)
        _, index = best_key(keys, lane)
    if JOINED > 0:
        index = tl.where(place == JOINED, E, index)
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
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Return the experts of a row that have these places, and their weights.

    lane: 0 to 31, [32]. CHOSEN: with the joined one. JOINED, GATED: see KernelChoice.
    """
    keys = row_keys(parts, bias, row, lane, T, PARTS, E, WIDE)
    key, index = best_key(keys, lane)
    most = _number(key)
    powers = _power(keys[0], most)
    for group in tl.static_range(1, len(keys)):
        powers += _power(keys[group], most)
    every = tl.sum(powers, 0)
    found = places * 0
    weights = places.to(tl.float32) * 0.0
    total = 0.0
    for place in tl.static_range(JOINED if JOINED > 0 else CHOSEN):
        if place > 0:
            keys = without(keys, index, lane)
            key, index = best_key(keys, lane)
        score = tl.exp(_number(key) - most) / every
        total += score
        found = tl.where(places == place, index, found)
        weights = tl.where(places == place, score, weights)
    if NORMALISED:
        weights = weights / (total + tiny)
    weights *= scale
    if JOINED > 0:
        share = 1.0
        if GATED:
            gate = 0.0
            for part in tl.static_range(PARTS):
                gate += tl.load(parts + (T.to(tl.int64) * part + row) * WIDE + E)
            share = 1.0 / (1.0 + tl.exp(-gate))
        found = tl.where(places == JOINED, E, found)
        weights = tl.where(places == JOINED, share, weights)
    return found, weights


@triton.jit
def token_experts(
    ids,
    weights,
    parts,
    bias,
    places,
    lane,
    T,
    scale,
    tiny,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    NORMALISED: tl.constexpr,
    JOINED: tl.constexpr,
    GATED: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Return the experts at these places of the token that a program has, and their weights.

    They are given as ids and weights [T, CHOSEN] if PARTS is 0, and else chosen here.
    """
    if PARTS > 0:
        return chosen_experts(
            parts, bias, tl.program_id(0), places, lane, T, scale, tiny,
            PARTS, E, WIDE, CHOSEN, NORMALISED, JOINED, GATED,
        )  # fmt: skip
    else:
        first = tl.program_id(0).to(tl.int64) * CHOSEN
        return tl.load(ids + first + places), tl.load(weights + first + places)


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
    joined: int = 0
    """Place of the joined expert, behind those that are chosen; 0 if there is none."""
    gated: bool = False
    """Whether the product has a gate of that one, behind the experts' logits."""


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
    return undecided.experts <= _MOST_EXPERTS and by_softmax_of_all(undecided)


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
        0 if undecided.joined is None else choice.num_chosen,
        undecided.joined is not None and undecided.joined.gated,
    )
