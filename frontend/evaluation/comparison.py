"""The comparison of two models over the same tokens: KL divergence and agreement."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sidestep.frontend.evaluation.perplexity import Tokens
from sidestep.frontend.evaluation.units import Figures, Result

Float64 = npt.NDArray[np.float64]
_ROUNDING = 1e-6
"""Probability that rounding of float32 log-probabilities may add to, or take from, their sum."""


def compare(
    model: Mapping[str, Result], reference: Mapping[str, Result], vocab_size: int
) -> Figures:
    """Return the figures of a model against a reference, from the results of the same windows.

    vocab_size: that of the larger vocabulary.
    """
    divergences: list[float] = []
    rest: list[float] = []
    agreeing = 0
    for name in reference:
        ours, theirs = Tokens.from_result(model[name]), Tokens.from_result(reference[name])
        found, mass = kl_divergence(theirs, ours, vocab_size)
        divergences += found.tolist()
        rest += mass.tolist()
        agreeing += int((ours.best == theirs.best).sum())
    tokens = len(divergences)
    ordered = sorted(divergences)
    return {
        # Rounding may bring the mean of two equal models just below 0.
        "kl_divergence": max(0.0, math.fsum(divergences) / tokens),
        "kl_p99": max(0.0, ordered[math.ceil(0.99 * tokens) - 1]),
        "kl_remaining_mass": math.fsum(rest) / tokens,
        "top1_agreement": agreeing / tokens,
        "tokens": tokens,
    }


def kl_divergence(reference: Tokens, model: Tokens, vocab_size: int) -> tuple[Float64, Float64]:
    """Return a lower bound of KL(reference || model) for each token, and the remaining mass, [n].

    Tokens whose probability both models report are compared one by one. The remaining tokens count
    as one, with the probability that the others leave. Merging outcomes never raises a KL
    divergence, so the bound holds; it is exact if all of the vocabulary is reported. The remaining
    mass is the reference's.
    """
    same = (reference.ids[:, :, None] == model.ids[:, None, :]) & (reference.ids[:, :, None] >= 0)
    shared = same.any(2)
    p = np.where(shared, reference.logprobs, -np.inf).astype(np.float64)
    at = np.take_along_axis(model.logprobs, same.argmax(2), 1)
    q = np.where(shared, at, -np.inf).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0)
    rest_p, rest_q = (np.clip(1 - np.exp(known).sum(1), 0.0, 1.0) for known in (p, q))
    is_whole = shared.sum(1) >= vocab_size
    rest_p[is_whole] = 0.0
    # Rounding may make the model's remaining probability too small, even 0, which would raise the
    # bound, even to infinity. A larger one only lowers it.
    rest_q = np.maximum(rest_q, np.minimum(rest_p, rest_q + _ROUNDING))
    ratio = np.divide(rest_p, rest_q, out=np.ones_like(rest_p), where=rest_p > 0)
    return each.sum(1) + rest_p * np.log(ratio), rest_p
