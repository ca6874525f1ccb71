"""The KL divergence of reported tokens is the true one, or a lower bound of it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import Logprob
from sidestep.frontend.evaluation.comparison import compare, kl_divergence
from sidestep.frontend.evaluation.perplexity import Tokens

Floats = npt.NDArray[np.float64]


def tokens(distributions: Floats, own: list[int], most: int) -> Tokens:
    """Return what an engine reports of distributions [n, V], for the tokens `own` of a text."""
    entries = []
    for probabilities, token in zip(distributions, own, strict=True):
        order = [int(one) for one in np.argsort(-probabilities, kind="stable")]
        reported = dict.fromkeys((token, *order[:most]))
        entries.append(
            {one: Logprob(math.log(probabilities[one]), order.index(one) + 1) for one in reported}
        )
    return Tokens.from_entries(entries, most)


def true_kl(p: Floats, q: Floats) -> Floats:
    result: Floats = (p * np.log(p / q)).sum(1)
    return result


def draw(seed: int, rows: int = 5, vocab_size: int = 12) -> Floats:
    logits = np.random.default_rng(seed).normal(0, 2, (rows, vocab_size))
    exponentials = np.exp(logits)
    probabilities: Floats = exponentials / exponentials.sum(1, keepdims=True)
    return probabilities


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_it_is_a_lower_bound_and_exact_with_all_of_the_vocabulary(seed: int, most: int) -> None:
    p, q, own = draw(seed), draw(seed + 1), [0, 3, 6, 9, 11]
    found, rest = kl_divergence(tokens(p, own, most), tokens(q, own, most), 12)
    true = true_kl(p, q)
    assert (found <= true + 1e-5).all() and (found >= -1e-5).all()
    if most == 12:
        assert found == pytest.approx(true, rel=1e-4, abs=1e-6)
        assert (rest == 0).all()


def test_the_remaining_tokens_count_as_one() -> None:
    p, q = np.array([[0.5, 0.3, 0.1, 0.1]]), np.array([[0.4, 0.2, 0.3, 0.1]])
    # The two most probable tokens are 0 and 1 of one, 0 and 2 of the other; the text has token 3.
    found, rest = kl_divergence(tokens(p, [3], 2), tokens(q, [3], 2), 4)
    # Tokens 0 and 3 are reported by both. Tokens 1 and 2 together have 0.4 and 0.5.
    expected = 0.5 * math.log(0.5 / 0.4) + 0.1 * math.log(0.1 / 0.1) + 0.4 * math.log(0.4 / 0.5)
    assert found == pytest.approx([expected], rel=1e-5)
    assert rest == pytest.approx([0.4], rel=1e-5)


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_a_model_against_itself(seed: int, most: int) -> None:
    results = {"window 1": tokens(draw(seed), [0, 3, 6, 9, 11], most).to_result()}
    figures = compare(results, results, 12)
    assert figures["kl_divergence"] == figures["kl_p99"] == 0
    assert figures["top1_agreement"] == 1 and figures["tokens"] == 5


def test_agreement_is_of_the_most_probable_tokens() -> None:
    p = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    q = np.array([[0.5, 0.4, 0.1], [0.3, 0.6, 0.1]])
    model, reference = ({"w": tokens(each, [2, 2], 1).to_result()} for each in (q, p))
    assert compare(model, reference, 3)["top1_agreement"] == 0.5


def test_rounding_of_certain_tokens_does_not_make_the_bound_infinite() -> None:
    p, q = np.array([[1 - 1e-4, 9e-5, 1e-5]]), np.array([[1 - 3e-9, 1e-9, 2e-9]])
    found, _ = kl_divergence(tokens(p, [0], 1), tokens(q, [0], 1), 3)
    assert 0 < found[0] <= true_kl(p, q)[0]
