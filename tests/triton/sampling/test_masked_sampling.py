"""Rows with masks, sampled by the kernels of a GPU's runner.

The tokens equal those of the CPU's sampler, at the rows' positions in the output.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sidestep.executor.sampling.sampler import Sampler
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import StepMasks
from tests.triton.sampling.test_special_sampling import MOST, POSITION, VOCAB, prepared
from tests.triton.support import DEVICE
from tests.unit.executor.steps import Request

CHOSEN = [3, 0, 7, 11, 5]
"""Slots of the step's rows."""
HELD = [True, False, True, True, True]
"""Whether each row's request has a grammar."""
ALLOWED = {0: [7, 900], 2: list(range(40, 1400, 7)), 4: [3]}
"""Tokens that a row's mask allows. Row 3 has none: its request has ended in the meantime."""


def make_requests() -> dict[int, Request]:
    return {
        slot: Request(
            [1] * (2 + i),
            9,
            temperature=[0.0, 1.0, 0.7][i % 3],
            top_k=[0, 5][i % 2],
            seed=i,
            controls=Controls(has_grammar=HELD[i]),
        )
        for i, slot in enumerate(CHOSEN)
    }


def allowed_bits() -> NDArray[np.uint8]:
    """Return a row for each mask of ALLOWED: 1 for each token that it allows."""
    bits = np.zeros((len(ALLOWED), -(-VOCAB // 32) * 32), np.uint8)
    for row, tokens in zip(bits, ALLOWED.values(), strict=True):
        row[tokens] = 1
    return bits


def test_masked_rows_get_the_sampler_s_tokens_and_plain_rows_are_left_alone() -> None:
    torch.manual_seed(0)
    step = prepared(make_requests())
    batch = step.batch
    # The step's own sampling leaves logits with some more columns.
    memory = torch.randn(MOST, VOCAB + 3, device=DEVICE) * 3
    logits, before = memory[:5, :VOCAB].cpu(), memory.clone()
    apart = step.special.find(batch)
    assert apart is not None and apart.masked.tolist() == [0, 2, 3, 4] and not len(apart.special)
    bits = allowed_bits()
    step.special.masks.take(
        step.message,
        StepMasks(
            6,
            5,
            np.array([0, 2, 4], np.int32),
            np.array([5, 6, 7], np.int32),
            np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(-1),
        ),
    )
    assert not step.apart.run(memory[:5, :VOCAB], batch, apart, step.rows, POSITION)
    rows = np.array(list(ALLOWED))
    logits = torch.where(torch.from_numpy(bits[:, :VOCAB] == 1), logits[rows], -torch.inf)
    expected = Sampler(batch.state)(logits, batch.slots[rows], batch.seq_lens[rows]).tolist()
    assert all(token in ALLOWED[row] for token, row in zip(expected, rows.tolist(), strict=True))
    assert step.sampler.out.ids[POSITION, :5].tolist() == [
        expected[0],
        -1,
        expected[1],
        -1,
        expected[2],
    ]
    assert step.last_sampled() == {
        CHOSEN[row]: token for row, token in zip(rows.tolist(), expected, strict=True)
    }
    assert torch.equal(memory[[1, 3]], before[[1, 3]]) and torch.equal(memory[5:], before[5:])
