"""Pairs of a token and an expert, sorted by their experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.common.sorted_pairs_triton import sort_pairs
from tests.triton.support import DEVICE, PoisonedAllocations, unchanged

EXPERTS = [1, 2, 5, 32, 128, 200]


def check(ids: Tensor, num_experts: int, in_tile: int) -> None:
    """Check tiles, and the order within them, against a stable sort."""
    pairs = ids.numel()
    with unchanged(ids=ids), PoisonedAllocations():
        found = sort_pairs(ids, num_experts, in_tile)
    order, experts, used, progress = (one.tolist() for one in found)
    wanted, owners = [], []
    for expert in range(num_experts):
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        own += [pairs] * (-len(own) % in_tile)
        wanted += own
        owners += [expert] * (len(own) // in_tile)
    assert used == [len(owners)]
    assert progress[: 1 + len(owners)] == [0] * (1 + len(owners))
    assert experts == owners + [num_experts] * (len(experts) - len(owners))
    assert order[: len(wanted)] == wanted
    assert len(order) == len(experts) * in_tile


def chosen(rows: int, num_experts: int, chosen: int) -> Tensor:
    values = torch.rand(rows, num_experts, generator=torch.Generator().manual_seed(rows))
    ids: Tensor = values.topk(chosen, 1).indices.int()
    return ids.to(DEVICE)


@pytest.mark.parametrize("in_tile", [16, 128])
@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("rows", [1, 7, 64, 65, 300])
def test_numbers_of_pairs(rows: int, num_experts: int, in_tile: int) -> None:
    check(chosen(rows, num_experts, min(4, num_experts)), num_experts, in_tile)


@pytest.mark.parametrize("num_experts", EXPERTS)
def test_pairs_that_are_left_out(num_experts: int) -> None:
    ids = chosen(90, num_experts, min(3, num_experts))
    ids[::3, 0] = -1
    check(ids, num_experts, 16)
    check(torch.full_like(ids, -1), num_experts, 16)


def test_all_pairs_of_one_expert() -> None:
    check(torch.full((500, 2), 3, dtype=torch.int32, device=DEVICE), 8, 64)


def test_more_pairs_than_shares_have_at_least() -> None:
    check(chosen(2500, 16, 4), 16, 128)
