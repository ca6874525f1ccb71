"""The kernel that finds the state of each row behind accepted drafts, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sidestep.ipc.model.speculative_config import MOST_DRAFTS
from sidestep.kernels.recurrent.begin_states_triton import begin_states
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS
from tests.triton.support import assert_untouched, guarded, int32, poisoned, unchanged

SLOTS = 150


class Slots:
    """The slots' tables on the device, and what they must hold."""

    def __init__(self, width: int) -> None:
        self.width = width
        progress = poisoned(SLOTS, 5, dtype=torch.int32)
        progress[:, 0] = 0
        self.num_computed = progress[:, 0]
        self.settled_at = guarded(int32([0] * SLOTS))
        self.expected = [0] * SLOTS

    def step(self, rows: list[tuple[int, int, int]], room: int = 0) -> Tensor:
        """Run the kernel on rows of (slot, known start or -1, settled tokens); return `begins`.

        The state of a slot is that of the same number.
        """
        slots, starts, settled = (int32(column) for column in zip(*rows, strict=True))
        first = torch.where(starts == 0, -1, slots * self.width)
        padding = int32([-7] * room)
        columns = [torch.cat([c, padding]) for c in (slots, starts, settled, first)]
        slots, starts, settled, first = columns
        begins = poisoned(len(rows) + room, dtype=torch.int32)
        with unchanged(slots=slots, starts=starts, settled=settled, first=first):
            begin_states(
                begins,
                first,
                header=int32([len(rows), 9]),
                slots=slots,
                starts=starts,
                settled=settled,
                num_computed=self.num_computed,
                settled_at=self.settled_at,
                width=self.width,
            )
        for slot, start, count in rows:
            start = int(self.num_computed[slot]) if start < 0 else start
            self.expected[slot] = start + count
        assert self.settled_at.tolist() == self.expected
        assert_untouched(begins[len(rows) :], "rows of padding")
        return begins[: len(rows)]


@pytest.mark.parametrize("width", [2, 5, 8])
def test_rows_begin_behind_the_drafts_that_were_accepted(width: int) -> None:
    rng, slots = random.Random(width), Slots(width)
    order = rng.sample(range(SLOTS), 140)
    prompts = [(slot, 0, rng.randint(1, 30)) for slot in order]
    assert slots.step(prompts).tolist() == [-1] * len(order)
    for _ in range(4):
        accepted = {slot: rng.randrange(width) for slot in order}
        for slot in order:
            slots.num_computed[slot] = slots.expected[slot] + accepted[slot]
        order = rng.sample(order, rng.randint(1, len(order)))
        begins = slots.step([(slot, -1, 1) for slot in order], room=rng.choice([0, 3, 128]))
        assert begins.tolist() == [slot * width + accepted[slot] for slot in order]


def test_a_request_that_enters_has_accepted_nothing() -> None:
    """The slot has a past, of another request, and the state of a checkpoint."""
    slots = Slots(4)
    slots.step([(3, 0, 9), (5, 0, 2)])
    slots.num_computed[3] = 11
    assert slots.step([(3, 32, 7), (5, 2, 1)]).tolist() == [12, 20]
    slots.num_computed[3], slots.num_computed[5] = 39, 4
    assert slots.step([(5, -1, 1), (3, -1, 1)]).tolist() == [21, 12]


@pytest.mark.parametrize("computed", [0, 100])
def test_a_row_that_is_dropped_reaches_no_other_state(computed: int) -> None:
    slots = Slots(3)
    slots.step([(7, 0, 20)])
    slots.num_computed[7] = computed
    assert int(slots.step([(7, -1, 1)])[0]) in range(21, 24)


def test_a_row_with_the_most_drafts_is_computed_token_by_token() -> None:
    assert MOST_DRAFTS < FEW_TOKENS
