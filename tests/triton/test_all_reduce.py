"""Sums over ranks in the interpreter: each rank a process (tests/triton/sum_ranks.py), three times with other numbers.

On GPUs: tests/gpu/test_all_reduce.py."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.all_reduce_triton import MAX_PROGRAMS, PeerMemory, choose, most_place_bytes, space_bytes
from sidestep.kernels.tuned_all_reduce import SUMS
from tests.triton.support import run_interpreted


def run_ranks(ranks: int, what: str) -> None:
    assert run_interpreted("tests.triton.sum_ranks", str(ranks), what) == f"{what} of {ranks} ranks: the same bits\n"


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bits_however_slow_one_of_them_is(ranks: int) -> None:
    run_ranks(ranks, "sums")


def test_a_model_of_four_ranks_sums_its_layers_so() -> None:
    """It has two KV heads, which are each two ranks'."""
    run_ranks(4, "model")


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_flags_and_places_do_not_overlap(ranks: int) -> None:
    place_bytes, dtype = 1 << 10, torch.float16
    space = torch.zeros(space_bytes(ranks, place_bytes), dtype=torch.uint8)
    memory = PeerMemory(0, (space.data_ptr(),) * ranks, space, torch.zeros(MAX_PROGRAMS), place_bytes, programs=1)
    space[:8 * MAX_PROGRAMS * ranks].fill_(1)
    for place in range(3):
        part = memory.part(place, 16, 32, dtype)
        assert part.data_ptr() % 256 == space.data_ptr() % 256
        assert not part.any()
        part.fill_(1)
    with pytest.raises(AssertionError):
        memory.part(0, 17, 32, dtype)


def test_the_table_rises_and_ends() -> None:
    for ranks, entries in SUMS.items():
        sizes = [size for size, _, _ in entries]
        assert sizes == sorted(set(sizes)) and all(0 < programs <= MAX_PROGRAMS for _, _, programs in entries)
        for size, kind, programs in entries:
            found = choose(ranks, size)
            assert found is not None and (found.kind, found.programs) == (kind, programs)
        assert most_place_bytes(ranks, 1 << 40) == sizes[-1] and choose(ranks, sizes[-1] + 1) is None
        assert most_place_bytes(ranks, 4000) == 4096


def test_a_number_of_ranks_that_was_not_measured_takes_the_next_larger() -> None:
    assert choose(3, 4096) == choose(4, 4096)
    assert choose(max(SUMS) + 1, 4096) is None and most_place_bytes(max(SUMS) + 1, 4096) == 0
