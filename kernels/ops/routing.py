"""Routing of tokens to experts: from one number for each expert to a few experts and weights."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.native import choice as native
from sidestep.kernels.ops.silu_mul import row_sigmoid

TINY = 1e-20
"""Least sum of chosen scores, which would else divide by zero."""


class Choice(NamedTuple):
    """How experts are chosen; ipc.model.layer_spec.RoutingSpec says what the fields mean."""

    num_chosen: int
    sigmoid: bool = False
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


class Joined(NamedTuple):
    """An expert that takes every token, as one more behind those that are chosen."""

    gated: bool
    """Whether its result is multiplied with the sigmoid of the product with the last row of the
    router's weights. Else it is taken as it is."""


class Routed(NamedTuple):
    """The experts of some tokens: by descending scores, and behind them one that is joined."""

    ids: Tensor
    """int32 [T, k]; negative for experts of other ranks."""
    weights: Tensor
    """float32 [T, k]: factors on the experts' results."""

    @property
    def chosen(self) -> int:
        """The number of experts of each token."""
        return self.ids.shape[1]

    def on_rank(self, own: range) -> Routed:
        """Return the same with the experts' numbers on a rank. own: its experts."""
        local = self.ids - own.start
        outside = (local < 0) | (local >= len(own))
        return Routed(local.masked_fill_(outside, -1), self.weights)

    def scaled(self, scales: Tensor) -> Routed:
        """Return the same with weights times the experts' factors. scales: of a rank's experts."""
        # Weights of other ranks' experts are not used, so that any factor will do.
        known = self.ids.clamp(0, len(scales) - 1)
        factors = scales.index_select(0, known.flatten())
        return Routed(self.ids, self.weights * factors.view_as(self.weights))


class Undecided(NamedTuple):
    """Tokens whose product with the router's weights is computed, but whose experts are not chosen.

    Kernels for a few rows choose them by themselves. `decided` of experts/routing_triton.py makes
    them Routed.
    """

    parts: Tensor
    """float32 [P, T, E, filled up to whole 16 bytes]: the product is their sum. With `weight`, they
    are the inputs [1, T, D]."""
    experts: int
    """Experts to choose from. If a joined one is gated, the product has one number more."""
    choice: Choice
    bias: Tensor | None
    """float32 [E], added to the scores for the choice."""
    product_bias: Tensor | None
    """float32 [E], added to the product."""
    own: range
    """This rank's experts, from which they are numbered."""
    joined: Joined | None
    weight: Tensor | None = None
    """[E, D], where the product is left to the kernel that chooses."""

    @property
    def chosen(self) -> int:
        """The number of experts of each token."""
        return self.choice.num_chosen + (self.joined is not None)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    choice: Choice,
    own: range | None = None,
    scales: Tensor | None = None,
) -> Routed:
    """Return the experts of each row. logits: float32 [T, E]. bias: float32 [E], or None.

    own: the experts of this rank, from which they are numbered; None for all. scales: float32, of
    these experts: factors on the weights. Between equal scores, the lower index is chosen. The bits
    of a row depend on that row alone.
    """
    mine = range(logits.shape[1]) if own is None else own
    made = native.choose(
        logits,
        bias,
        scales,
        mine,
        chosen=choice.num_chosen,
        groups=choice.groups,
        chosen_groups=choice.chosen_groups,
        sigmoid=choice.sigmoid,
        normalised=choice.normalised,
        scale=choice.scale,
        tiny=TINY,
    )
    if made is not None:
        return Routed(*made)
    routed = _chosen_by_torch(logits, bias, choice)
    routed = routed if own is None else routed.on_rank(own)
    return routed if scales is None else routed.scaled(scales)


def _chosen_by_torch(logits: Tensor, bias: Tensor | None, choice: Choice) -> Routed:
    """Return the experts of each row, numbered as in the model."""
    scores = row_sigmoid(logits) if choice.sigmoid else torch.softmax(logits, -1)
    ranked = scores if bias is None else scores + bias
    if choice.chosen_groups < choice.groups:
        ranked = _of_best_groups(ranked, choice)
    ids = _largest(ranked, choice.num_chosen)
    weights = scores.gather(1, ids)
    if choice.normalised:
        # Added one by one: torch's sum has another order for other shapes.
        total = reduce(torch.add, weights.unbind(1))
        weights = weights / (total + TINY)[:, None]
    return Routed(ids.int(), weights * choice.scale)


def _of_best_groups(scores: Tensor, choice: Choice) -> Tensor:
    """Return the scores of the best groups' experts, and -inf for all others."""
    groups = scores.unflatten(1, (choice.groups, -1))
    best = groups.sort(dim=-1, descending=True).values[..., :2]
    sums = best[..., 0] + best[..., 1] if best.shape[-1] > 1 else best[..., 0]
    others = torch.ones_like(sums, dtype=torch.bool)
    others.scatter_(1, _largest(sums, choice.chosen_groups), False)
    return groups.masked_fill(others[..., None], float("-inf")).flatten(1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the indices [T, count] of the largest scores of each row, the largest first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
