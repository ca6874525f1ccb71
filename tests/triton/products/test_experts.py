"""The kernels of a mixture of experts against float64, and against the reference of the choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops.routing import Choice, Routed, choose_experts
from sidestep.kernels.products.experts_triton import few_pairs, multiply_experts, sort_pairs
from sidestep.kernels.products.routing_triton import route
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    INTERPRETED,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    int32,
    unchanged,
)

SUPPORTED = DTYPES if INTERPRETED else DTYPES[1:]
"""Types of the tests. On a GPU the tensor cores would round float32 to 10 bits."""


def routing(values: Values, rows: int, chosen: int, experts: int) -> Routed:
    ids = [values.different(chosen, experts) for _ in range(rows)]
    return Routed(int32(ids), values.normal(rows, chosen, dtype=torch.float32))


def exact(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, *, gelu: bool) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (ids, weights) in enumerate(zip(*routed, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            activated = (
                torch.nn.functional.gelu(gate, approximate="tanh")
                if gelu
                else gate / (1 + (-gate).exp())
            )
            out[token] += weight * (down[expert].double() @ (activated * up))
    return out


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    ("rows", "chosen", "experts", "width", "inner"),
    [(1, 2, 4, 48, 36), (5, 3, 7, 130, 17), (70, 2, 3, 33, 65), (9, 1, 40, 16, 128)],
)
def test_any_size(
    rows: int, chosen: int, experts: int, width: int, inner: int, add: bool, few: bool
) -> None:
    for dtype in SUPPORTED if rows == 5 else SUPPORTED[:1]:
        values = Values(rows + width)
        x = guarded(values.normal(rows, width, dtype=dtype))
        gate_up = guarded(values.normal(experts, 2 * inner, width, dtype=dtype, scale=width**-0.5))
        down = guarded(values.normal(experts, width, inner, dtype=dtype, scale=inner**-0.5))
        before = values.normal(rows, width, dtype=dtype)
        routed, out = routing(values, rows, chosen, experts), guarded(before)
        gelu = rows == 5
        with unchanged(x=x, gate_up=gate_up, down=down), PoisonedAllocations():
            multiply_experts(x, routed, gate_up, down, out, add=add, gelu=gelu, few=few)
        wanted = exact(x, routed, gate_up, down, gelu=gelu) + (before.double() if add else 0)
        assert_close(out, wanted, ulps=16)


@pytest.mark.parametrize("few", [True, False])
def test_a_token_does_not_depend_on_those_beside_it(few: bool) -> None:
    values = Values(4)
    x, routed = values.normal(9, 40, dtype=DTYPE), routing(values, 9, 2, 5)
    gate_up, down = values.normal(5, 60, 40, dtype=DTYPE), values.normal(5, 40, 30, dtype=DTYPE)

    def run(rows: int) -> Tensor:
        out = torch.zeros(rows, 40, dtype=DTYPE, device=DEVICE)
        own = Routed(routed.ids[-rows:].contiguous(), routed.weights[-rows:].contiguous())
        multiply_experts(x[-rows:].contiguous(), own, gate_up, down, out, add=False, few=few)
        return out

    together = run(9)
    assert all(torch.equal(run(rows), together[-rows:]) for rows in (1, 2, 8))


def test_pairs_are_sorted_by_expert_and_then_by_number() -> None:
    values = Values(1)
    ids = int32([values.different(3, 11) for _ in range(700)])
    ids[ids == 4] = 5  # an expert without pairs
    with PoisonedAllocations():
        order, experts = sort_pairs(ids, 11)
    found = order.view(len(experts), -1).tolist()
    flat = ids.flatten().tolist()
    got = {
        expert: [
            p for own, e in zip(found, experts.tolist(), strict=True) if e == expert for p in own
        ]
        for expert in range(11)
    }
    for expert, pairs in got.items():
        real = [p for p in pairs if p < len(flat)]
        assert real == [p for p, e in enumerate(flat) if e == expert]
        assert pairs == real + [len(flat)] * (len(pairs) - len(real))
        assert len(pairs) - len(real) < 64
    assert experts.tolist() == sorted(experts.tolist())


def test_few_pairs_read_no_more_matrices_than_there_are() -> None:
    assert few_pairs(16, 8, 128) and not few_pairs(17, 8, 128)


CHOICES = [
    Choice(2),
    Choice(3, normalised=True),
    Choice(3, sigmoid=True, normalised=True, scale=2.5),
    Choice(4, sigmoid=True, groups=4, chosen_groups=2),
    Choice(1, groups=12, chosen_groups=5),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_choice_equals_the_reference(choice: Choice, biased: bool) -> None:
    values = Values(7)
    x = guarded(values.normal(37, 70, dtype=torch.float32))
    weight = guarded(values.normal(12, 70, dtype=torch.float32, scale=0.2))
    bias = guarded(values.normal(12, dtype=torch.float32)) if biased else None
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        got = route(x, weight, bias, choice)
    expected = choose_experts(
        (x.double() @ weight.double().T).float().cpu(), None if bias is None else bias.cpu(), choice
    )
    assert torch.equal(got.ids.cpu(), expected.ids)
    torch.testing.assert_close(got.weights.cpu(), expected.weights)


def test_of_equal_scores_the_lowest_index_is_chosen() -> None:
    x = torch.zeros(3, 16, dtype=DTYPE, device=DEVICE)
    weight = torch.zeros(20, 16, dtype=DTYPE, device=DEVICE)
    choice = Choice(3, groups=5, chosen_groups=2)
    logits = torch.zeros(3, 20)
    for routed in (route(x, weight, None, choice), choose_experts(logits, None, choice)):
        assert routed.ids.tolist() == [[0, 1, 2]] * 3
        assert routed.weights.flatten().tolist() == pytest.approx([1 / 20] * 9)


def test_padding_that_is_not_a_number_still_names_experts() -> None:
    x = torch.full((2, 16), float("nan"), dtype=DTYPE, device=DEVICE)
    routed = route(x, torch.ones(6, 16, dtype=DTYPE, device=DEVICE), None, Choice(2))
    assert bool(((routed.ids >= 0) & (routed.ids < 6)).all())
