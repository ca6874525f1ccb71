"""Special rows, sampled by the kernels of a GPU's runner.

The tokens equal those of the CPU's sampler, at the rows' positions in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.gpu.apart_rows import ApartRows
from sidestep.executor.gpu.device_tables import RowColumns, StepRows, make_slot_tables
from sidestep.executor.gpu.token_sampler import TokenSampler
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch, make_batch
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.logits_processor import ProcessorSetup
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialRows
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.slot_columns import device_words
from sidestep.ipc.transport.step import StepInput
from sidestep.kernels.triton.prepare_step_triton import (
    HEADER,
    LAST_SAMPLED,
    NUM_COMPUTED,
    ROWS,
    SAMPLING,
    StepLayout,
)
from tests.triton.support import DEVICE, int32
from tests.unit.executor.steps import Request, make_step

VOCAB, MOST, ROTATION = 1500, 20, 4
LIMITS = SchedulerConfig(max_num_seqs=MOST, max_num_batched_tokens=64).limits("cuda")
POSITION = 2
"""The step's row in pinned memory."""


@dataclass
class Step:
    """A step whose logits are there, and the parts of a GPU's runner that sample rows apart."""

    message: StepInput
    batch: HostBatch
    rows: StepRows
    special: SpecialRows
    sampler: TokenSampler
    apart: ApartRows
    progress: Tensor

    def last_sampled(self) -> dict[int, int]:
        """Return the last token of each slot that has one."""
        tokens = self.progress[:, LAST_SAMPLED].tolist()
        return {slot: token for slot, token in enumerate(tokens) if token >= 0}


def prepared(requests: dict[int, Request], plain: Sequence[int] = ()) -> Step:
    """Return a step in which all these requests enter and sample.

    plain: rows that the step has sampled with the others.
    """
    state = HostTables(LIMITS.num_slots, 64, 16)
    rows = [(slot, len(r.prompt), [i]) for i, (slot, r) in enumerate(requests.items())]
    message = make_step(rows, requests, 6)
    state.apply(message)
    batch = make_batch(state, message, 16)
    tables = make_slot_tables(LIMITS, 64, 16, 1, DEVICE, last=True)
    tables.parameters.copy_(torch.from_numpy(device_words(state.records).copy()))
    tables.progress.fill_(-1)
    setup = ProcessorSetup(device=DEVICE, vocab_size=VOCAB, num_slots=LIMITS.num_slots)
    special = SpecialRows([], GrammarMasks(setup, 8), LIMITS.num_slots, DEVICE)
    special.enter(message)
    sampler = TokenSampler(tables, LIMITS, None, VOCAB, ROTATION)
    sampler.out.ids.fill_(-1)
    layout, count = StepLayout(8, 32), len(rows)
    words = torch.zeros(layout.token_ids, dtype=torch.int32, device=DEVICE)
    assert words.numel() > HEADER
    for at in (SAMPLING, ROWS):
        words[at : at + 2] = int32([count, POSITION])
    words[layout.at("slots") : layout.at("slots") + count] = int32(batch.slots.tolist())
    step_rows = RowColumns(LIMITS, DEVICE).step_rows(words, layout, count, 1)
    step_rows.seq_lens.copy_(torch.from_numpy(batch.seq_lens))
    step_rows.last_known.copy_(torch.from_numpy(batch.seq_lens - 1))
    step_rows.valid.fill_(1)
    return Step(
        message,
        batch,
        step_rows,
        special,
        sampler,
        ApartRows(special, sampler, tables, ROTATION, MOST),
        tables.progress,
    )


@pytest.mark.parametrize("number", [1, 5])
def test_special_rows_get_the_sampler_s_tokens(number: int) -> None:
    torch.manual_seed(number)
    chosen = [3, 0, 7, 11, 5][:number]
    requests = {
        slot: Request(
            [1] * (2 + i),
            9,
            temperature=[0.0, 1.0, 0.7][i % 3],
            top_k=[0, 5][i % 2],
            seed=i,
            min_tokens=i % 2,
            stop_ids=[10, 11] if i % 2 else [],
            controls=Controls(logprobs=1),
        )
        for i, slot in enumerate(chosen)
    }
    step = prepared(requests)
    logits = torch.randn(number, VOCAB) * 3
    logits[:, 10] = 90.0  # tokens that some rows must not sample yet
    batch = step.batch
    expected = Sampler(batch.state)(logits, batch.slots, batch.seq_lens)
    found = step.special.find(batch)
    assert found is not None and len(found.special) == number
    (told,) = step.apart.run(logits.to(DEVICE), batch, found, step.rows, POSITION)
    assert set(expected[::2].tolist()) == {10} and 10 not in expected[1::2].tolist()
    out = step.sampler.out.ids
    assert out[POSITION, :number].tolist() == expected.tolist()
    assert int((out >= 0).sum()) == number
    assert step.last_sampled() == dict(zip(chosen, expected.tolist(), strict=True))
    computed = step.progress[:, NUM_COMPUTED].cpu().numpy()
    assert computed[chosen].tolist() == batch.seq_lens.tolist()
    assert told.of_rows.positions.tolist() == batch.seq_lens.tolist()
    assert told.of_rows.packed[:, 1].tolist() == expected.tolist()
    assert np.array_equal(told.of_rows.keys, np.arange(number))
