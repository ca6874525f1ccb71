"""The choice of experts by the kernel in C: that of torch, for every way of choosing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.native import choice as native
from sidestep.kernels.native.library import NoLibraryError, load
from sidestep.kernels.ops import routing
from sidestep.kernels.ops.routing import Choice, Routed, choose_experts

WAYS = {
    "softmax": Choice(4),
    "one expert": Choice(1),
    "all experts": Choice(24, normalised=True),
    "normalised": Choice(4, normalised=True, scale=2.5),
    "sigmoid": Choice(4, sigmoid=True, normalised=True, scale=0.5),
    "groups": Choice(4, sigmoid=True, groups=6, chosen_groups=2),
    "groups of one": Choice(5, groups=24, chosen_groups=7),
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        load("choice.c")
    except NoLibraryError as error:
        pytest.skip(str(error))


def by_torch(
    logits: Tensor, bias: Tensor | None, choice: Choice, own: range, scales: Tensor | None
) -> Routed:
    routed = routing._chosen_by_torch(logits, bias, choice).on_rank(own)
    return routed if scales is None else routed.scaled(scales)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("own", [range(24), range(8, 16)])
def test_it_chooses_as_torch_does(way: str, biased: bool, own: range) -> None:
    choice = WAYS[way]
    # Few distinct numbers, so that many are equal.
    logits = torch.randint(-6, 7, (97, 24)).float() * 0.75
    bias = torch.randint(-2, 3, (24,)).float() / 8 if biased else None
    for scales in (None, torch.rand(len(own)) + 0.5):
        made = choose_experts(logits, bias, choice, own, scales)
        expected = by_torch(logits, bias, choice, own, scales)
        assert torch.equal(made.ids, expected.ids)
        there = made.ids >= 0
        torch.testing.assert_close(made.weights[there], expected.weights[there])


def test_a_token_has_the_same_bits_alone_and_among_others() -> None:
    logits, threads = 8 * torch.randn(200, 24), torch.get_num_threads()
    together = choose_experts(logits, None, WAYS["normalised"])
    try:
        for first, count in ((0, 1), (3, 2), (50, 150)):
            torch.set_num_threads(1 + count % 3)
            part = slice(first, first + count)
            alone = choose_experts(logits[part].clone(), None, WAYS["normalised"])
            assert torch.equal(alone.ids, together.ids[part])
            assert torch.equal(alone.weights, together.weights[part])
    finally:
        torch.set_num_threads(threads)


def test_numbers_that_are_not_finite_spoil_their_own_token_alone() -> None:
    logits = torch.randn(4, 24)
    logits[1, 5], logits[2, 0] = torch.nan, torch.inf
    routed = choose_experts(logits, None, WAYS["softmax"])
    assert routed.weights[[0, 3]].isfinite().all() and not routed.weights[1].isfinite().any()
    assert ((routed.ids >= 0) & (routed.ids < 24)).all()
    assert all(len(set(row)) == 4 for row in routed.ids.tolist())


def test_what_it_does_not_take_is_chosen_by_torch() -> None:
    many = torch.randn(3, 1025)
    assert native._MOST == 1024
    routed = choose_experts(many, None, Choice(2))
    assert torch.equal(routed.ids.long(), many.topk(2).indices)
    apart = torch.randn(3, 48)[:, ::2]
    assert torch.equal(choose_experts(apart, None, Choice(2)).ids.long(), apart.topk(2).indices)
