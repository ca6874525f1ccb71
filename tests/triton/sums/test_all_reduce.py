"""Sums over ranks in the interpreter.

Each rank is a process (tests/triton/sums/sum_ranks.py), and all run three times with other numbers.
tests/gpu/sums/test_all_reduce.py tests sums on GPUs.
"""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.sums import all_reduce_triton
from sidestep.kernels.sums.all_reduce_triton import SumConfig, choose, most_buffer_bytes
from sidestep.kernels.sums.peer_memory_triton import (
    MAX_PROGRAMS,
    NUM_BUFFERS,
    NUM_COUNTERS,
    TURNS,
    PeerMemory,
    space_bytes,
)
from sidestep.kernels.sums.pushed_sum_triton import can_push
from sidestep.kernels.sums.tuned_all_reduce import SUMS
from tests.triton.support import run_interpreted


def run_ranks(ranks: int, what: str) -> None:
    assert (
        run_interpreted("tests.triton.sums.sum_ranks", str(ranks), what)
        == f"{what} of {ranks} ranks: the same bits\n"
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bits_however_slow_one_of_them_is(ranks: int) -> None:
    run_ranks(ranks, "sums")


def test_a_model_of_four_ranks_sums_its_layers_so() -> None:
    """Sum the layers of a model of four ranks, whose two KV heads belong to two ranks each."""
    run_ranks(4, "model")


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_flags_places_and_areas_do_not_overlap(ranks: int) -> None:
    place_bytes, dtype = 1 << 10, torch.float16
    space = torch.zeros(space_bytes(ranks, place_bytes), dtype=torch.uint8)
    memory = PeerMemory(
        0, (space.data_ptr(),) * ranks, space, torch.zeros(NUM_COUNTERS), place_bytes, programs=1
    )
    space[: 8 * MAX_PROGRAMS * ranks].fill_(1)
    for place in range(3):
        part = memory.part(place, 16, 32, dtype)
        assert part.data_ptr() % 256 == space.data_ptr() % 256
        assert not part.any()
        part.fill_(1)
    with pytest.raises(AssertionError):
        memory.part(0, 17, 32, dtype)
    areas = space[memory.offset(NUM_BUFFERS) :]
    assert not areas.any() and areas.numel() == TURNS * ranks * memory.area_bytes
    assert memory.area_bytes == 2 * place_bytes and areas.data_ptr() % 256 == space.data_ptr() % 256


def test_the_table_rises_and_ends() -> None:
    for ranks, entries in SUMS.items():
        sizes = [size for size, _, _ in entries]
        assert sizes == sorted(set(sizes)) and all(
            0 < programs <= MAX_PROGRAMS for _, _, programs in entries
        )
        for size, kind, programs in entries:
            found = choose(ranks, size // 1024, 1024)
            assert found is not None and (found.kind, found.programs) == (kind, programs)
        assert (
            most_buffer_bytes(ranks, 1 << 40) == sizes[-1]
            and choose(ranks, 1, sizes[-1] + 1) is None
        )
        assert most_buffer_bytes(ranks, 4000) == 4096


def test_a_number_of_ranks_that_was_not_measured_takes_the_next_larger() -> None:
    assert choose(3, 1, 4096) == choose(4, 1, 4096)
    assert choose(max(SUMS) + 1, 1, 4096) is None and most_buffer_bytes(max(SUMS) + 1, 4096) == 0


def test_what_cannot_be_pushed_takes_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        all_reduce_triton,
        "SUMS",
        {
            2: ((1 << 16, "pushed", 4), (1 << 18, "pushed", 8), (1 << 20, "one_shot", 2)),
            8: ((1 << 20, "pushed", 1),),
        },
    )
    assert choose(2, 4, 8192) == SumConfig("pushed", 4)
    assert choose(2, 5, 33 * 2) == SumConfig("one_shot", 2), (
        "a word of data is two values of 16 bits"
    )
    assert choose(2, 9, 8192) == SumConfig("one_shot", 2), "areas are no larger"
    assert choose(8, 1, 8192) is not None and choose(8, 1, 16384) is None, (
        "a program's registers hold no more words"
    )
    assert not can_push(8, 1, 16384) and can_push(4, 1, 16384) and not can_push(2, 1, 32768)
