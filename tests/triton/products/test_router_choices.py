"""The router of prompts, whose product chooses the experts itself, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts import routing_triton
from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.routing_triton import route
from sidestep.kernels.ops.routing import Choice, Joined, choose_experts
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    guarded,
    unchanged,
)

CHOICES = [
    Choice(1),
    Choice(3, normalised=True),
    Choice(8, normalised=True, scale=1.5),
    Choice(3, sigmoid=True, normalised=True, scale=2.5),
    Choice(4, sigmoid=True, groups=4, chosen_groups=2),
]
ROWS = 67


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some rows be as many as those of prompts."""
    monkeypatch.setattr(routing_triton, "_TILED_ROWS", ROWS)


def exact_numbers(values: Values, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return numbers whose products have exact sums, some of which are equal."""
    return guarded((values.normal(*shape, dtype=torch.float32) * 4).round().to(dtype) / 8)


def check(
    experts: int,
    choice: Choice,
    *,
    biased: bool = False,
    own: range | None = None,
    joined: Joined | None = None,
    dtype: torch.dtype = DTYPE,
) -> None:
    values = Values(experts + choice.num_chosen)
    x = exact_numbers(values, ROWS, 72, dtype=dtype)
    weight = exact_numbers(values, experts, 72, dtype=dtype)
    bias = (
        exact_numbers(values, experts, dtype=torch.float32) if biased and choice.sigmoid else None
    )
    product_bias = exact_numbers(values, experts, dtype=torch.float32) if biased else None
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        undecided = route(x, weight, bias, choice, own, product_bias, joined=joined)
        got = decided(undecided)
    assert undecided.weight is weight
    logits = x.double() @ weight.double().T + (0 if product_bias is None else product_bias.double())
    expected = choose_experts(
        logits.float().cpu(), None if bias is None else bias.cpu(), choice, own
    )
    chosen = choice.num_chosen
    assert torch.equal(got.ids.cpu()[:, :chosen], expected.ids)
    torch.testing.assert_close(got.weights.cpu()[:, :chosen], expected.weights)
    if joined is not None:
        assert got.ids[:, chosen].tolist() == [experts] * ROWS
        assert got.weights[:, chosen].tolist() == [1.0] * ROWS


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_choices(choice: Choice, biased: bool) -> None:
    check(12, choice, biased=biased)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [2, 33, 100, 128])
def test_numbers_of_experts(experts: int, dtype: torch.dtype) -> None:
    check(experts, Choice(2, normalised=True), dtype=dtype)


def test_experts_of_a_rank() -> None:
    check(32, Choice(8, normalised=True), own=range(8, 24))


def test_a_joined_expert_without_a_gate() -> None:
    check(32, Choice(4), joined=Joined(gated=False))


def test_padding_of_any_kind_names_an_expert_and_changes_no_other_row() -> None:
    values, choice = Values(3), Choice(8, normalised=True)
    x, weight = values.normal(ROWS, 64, dtype=DTYPE), values.normal(128, 64, dtype=DTYPE)
    clean = decided(route(x, weight, None, choice))
    x[ROWS // 2] = float("nan")
    got = decided(route(x, weight, None, choice))
    assert bool(((got.ids >= 0) & (got.ids < 128)).all())
    others = torch.arange(ROWS, device=DEVICE) != ROWS // 2
    assert torch.equal(got.ids[others], clean.ids[others])
    assert torch.equal(got.weights[others], clean.weights[others])


def test_a_gate_and_many_experts_are_chosen_by_a_kernel_of_its_own() -> None:
    x, choice = torch.ones(ROWS, 16, dtype=DTYPE, device=DEVICE), Choice(2)
    for experts, joined in ((129, None), (12, Joined(gated=True))):
        weight = torch.ones(experts + (joined is not None), 16, dtype=DTYPE, device=DEVICE)
        assert route(x, weight, None, choice, joined=joined).weight is None
