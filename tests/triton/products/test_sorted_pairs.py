"""Pairs of a token and an expert, sorted by their experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.common import sorted_pairs_hopper
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.experts.common.sorted_pairs_triton import sort_pairs
from tests.triton.support import DEVICE, PoisonedAllocations, needs_hopper, unchanged

EXPERTS = [1, 2, 5, 32, 128, 200]
MANY = [2048, 4096, 16384, 16400, 65536, 131080, 1 << 21]
"""Pairs that one kernel counts and places, and those that two kernels do."""


def check(ids: Tensor, num_experts: int, in_tile: int) -> None:
    """Check tiles, and the order within them, against a stable sort."""
    with unchanged(ids=ids), PoisonedAllocations():
        found = sort_pairs(ids, num_experts, in_tile)
    check_found(found, ids, num_experts, in_tile)


def check_found(found: SortedPairs, ids: Tensor, num_experts: int, in_tile: int) -> None:
    pairs, flat = ids.numel(), ids.flatten().cpu()
    order, experts, used, progress = (one.tolist() for one in found)
    wanted, owners = [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero().flatten().tolist()
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


def random_ids(pairs: int, num_experts: int, least: int = 0) -> Tensor:
    """Return ids [pairs, 1] from `least` on."""
    generator = torch.Generator().manual_seed(pairs)
    return torch.randint(least, num_experts, (pairs, 1), generator=generator).int().to(DEVICE)


@pytest.mark.parametrize("num_experts", [1, 2, 128, 512, 1024])
@pytest.mark.parametrize(
    "pairs", [1, 7, *(pytest.param(pairs, marks=needs_hopper) for pairs in MANY)]
)
def test_many_pairs_and_experts(pairs: int, num_experts: int) -> None:
    check(random_ids(pairs, num_experts), num_experts, 16)


def test_ids_at_any_address() -> None:
    check(random_ids(301, 8)[1:], 8, 16)


@needs_hopper
class TestOnHopper:
    @pytest.mark.parametrize("pairs", MANY)
    def test_pairs_of_any_distribution(self, pairs: int) -> None:
        assert sorted_pairs_hopper.suits(random_ids(pairs, 128), 128)
        check(torch.full((pairs, 1), 77, dtype=torch.int32, device=DEVICE), 128, 128)
        check(random_ids(pairs, 128, least=-1000), 128, 48)
        check(random_ids(pairs, 1, least=-(1 << 31)), 128, 128)
        check(random_ids(pairs + 3, 128)[3:], 128, 64)

    def test_more_experts_than_threads(self) -> None:
        check(random_ids(40000, sorted_pairs_hopper._MOST_EXPERTS), 2048, 16)

    def test_sorts_that_follow_one_another(self) -> None:
        """Memory of a sort's counts serves the next sort, which may start before its end."""
        every = [random_ids(pairs, 128) for pairs in (20000, 2048, 40000, 20001) * 3]
        found = [sort_pairs(ids, 128, 16) for ids in every]
        for one, ids in zip(found, every, strict=True):
            check_found(one, ids, 128, 16)
