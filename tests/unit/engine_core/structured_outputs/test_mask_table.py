"""The mask table: each mask is sent once, and no step's masks overwrite each other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.structured_outputs.mask_table import MaskTable
from sidestep.ipc.transport.step import StepMasks

WORDS = 3


class Worker:
    """A worker's table, which follows the messages."""

    def __init__(self, num_masks: int) -> None:
        self.table = np.zeros((num_masks, WORDS), np.int32)

    def take(self, masks: StepMasks) -> dict[int, list[int]]:
        new = masks.words.reshape(-1, WORDS)
        self.table[masks.first_new : masks.first_new + len(new)] = new
        return {
            row: self.table[index].tolist()
            for row, index in zip(masks.rows.tolist(), masks.mask_indices.tolist(), strict=True)
        }


def grammars(count: int) -> list[GrammarState]:
    return [GrammarState("") for _ in range(count)]


def mask(number: int) -> list[int]:
    return [number] * WORDS


def test_a_mask_that_the_workers_have_is_not_sent_again() -> None:
    table, (a, b) = MaskTable(8), grammars(2)
    first = table.message(0, [3, 5], [a, b], list(np.array([mask(1), mask(1)], np.int32)))
    assert (first.first_new, first.mask_indices.tolist(), first.words.tolist()) == (
        0,
        [0, 0],
        mask(1),
    )
    second = table.message(1, [3, 5], [a, b], list(np.array([mask(1), mask(2)], np.int32)))
    assert (second.first_new, second.mask_indices.tolist(), second.words.tolist()) == (
        1,
        [0, 1],
        mask(2),
    )
    swapped = table.message(2, [3, 5], [a, b], list(np.array([mask(2), mask(1)], np.int32)))
    assert (swapped.mask_indices.tolist(), len(swapped.words)) == ([1, 0], 0)


@pytest.mark.parametrize("num_masks", [6, 7, 20])
@pytest.mark.parametrize("kinds", [4, 30])
def test_workers_have_what_each_row_may_sample(num_masks: int, kinds: int) -> None:
    """Cover a table of few mask indices, as long as a step's masks fit."""
    rng, table, worker, everyone = (
        random.Random(num_masks),
        MaskTable(num_masks),
        Worker(num_masks),
        grammars(9),
    )
    num_sent = 0
    for step in range(300):
        count = rng.randrange(7)
        chosen = rng.sample(everyone, count)
        wanted = [mask(rng.randrange(kinds)) for _ in range(count)]
        message = table.message(
            step, range(count), chosen, list(np.array(wanted, np.int32).reshape(count, WORDS))
        )
        num_sent += len(message.words) // WORDS
        assert worker.take(StepMasks.decode(b"".join(map(bytes, message.encode())))) == dict(
            enumerate(wanted)
        )
    assert num_sent == kinds if num_masks > kinds + 6 else num_sent > kinds
