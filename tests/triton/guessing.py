"""Drafts of an oracle for the GPU's runner without a GPU (see gpu_stand_in.py)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from sidestep.executor.gpu.device_tables import StepRows
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.ipc.transport.messages import AddRequest, unpack_ids
from sidestep.ipc.transport.slot_columns import device_word
from sidestep.kernels.triton.prepare_step_triton import DRAFTS, NUM_COMPUTED, NUM_DRAFTS
from tests.triton.support import int32


def texts(added: Sequence[AddRequest], tokens: Mapping[int, list[int]]) -> list[list[int]]:
    """Return prompts with the outputs behind them."""
    prompts = {r.handle + i: r.prompt_token_ids for r in added for i in range(r.sampling.n)}
    return [[*unpack_ids(prompts[handle]).tolist(), *found] for handle, found in tokens.items()]


@contextmanager
def guessing(
    runner: GpuRunner, texts: Iterable[Sequence[int]], rate: float
) -> Iterator[list[list[int]]]:
    """Let drafts be those of an oracle that knows the texts, and is right at this rate.

    A random model's outputs hardly repeat, so looked-up drafts would seldom be right. The list that
    is yielded grows by the drafts that each row of a step with drafts has accepted.
    """
    chance, known, drafts = random.Random(5), [list(text) for text in texts], runner._memory.sampler
    assert drafts is not None
    accepted: list[list[int]] = []
    advance: Any = drafts.advance

    def advance_and_guess(rows: StepRows, valid: Tensor, marks: Tensor) -> None:
        advance(rows, valid, marks)
        tables, of_rows = runner._memory.tables, []
        for row in range(int(rows.by_row[0])):
            slot = int(rows.slots[row])
            length = int(tables.progress[slot, NUM_COMPUTED]) + 1
            begun = tables.tokens[slot, :length].tolist()
            follows = [text[length:] for text in known if text[:length] == begun]
            limit, end = tables.parameters[slot, [device_word("max_drafts"), tables.max_total]]
            room = min(int(limit), int(end) - length)
            if not int(marks[row]):
                continue
            of_rows.append(length - 2 - int(rows.last_known[row]))
            if not follows or room <= 0:
                continue
            guesses = [t if chance.random() < rate else 3 for t in follows[0][:room]]
            tables.progress[slot, NUM_DRAFTS] = len(guesses)
            tables.progress[slot, DRAFTS : DRAFTS + len(guesses)] = int32(guesses)
        if rows.queries > 1:
            accepted.append(of_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "advance", advance_and_guess)
        yield accepted
