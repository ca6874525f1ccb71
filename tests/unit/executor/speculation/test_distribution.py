"""The tokens that rows with drafts give are draws from the model's own distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sidestep.executor.cpu.drafted_rows import DraftedRows
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.executor.runner.slot_state import SlotState
from sidestep.executor.sampling.sampler import Sampler
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.ops.sampling import mask_top_k_top_p_min_p
from tests.unit.executor.steps import Request, make_step

VOCAB, ROWS, NUM_TOKENS = 16, 1500, 3
PROMPT = [1, 2]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3},
]


def outputs(logits: torch.Tensor, params: dict[str, Any], most: int) -> Int32:
    """Return the first tokens of ROWS requests, [ROWS, NUM_TOKENS].

    logits: [positions, VOCAB], which decide the token at each position. most: drafts of each step;
    each is the most probable token of its position.
    """
    state, slots = HostTables(ROWS, 32, 32), SlotState(ROWS, 5)
    rows, sampler = DraftedRows(state, slots, None), Sampler(state)
    requests = {slot: Request(PROMPT, 20, seed=slot, **params) for slot in range(ROWS)}
    step = make_step([(slot, len(PROMPT), [slot]) for slot in range(ROWS)], requests)
    found: list[list[int]] = [[] for _ in range(ROWS)]
    while min(map(len, found)) < NUM_TOKENS:
        state.apply(step)
        rows.enter(step)
        batch = make_batch(state, step, 32, rows.count(step))
        lens, owners = batch.logits_lens, batch.slots[batch.logits_rows]
        sampled = sampler(logits[torch.from_numpy(lens.astype(np.int64))], owners, lens)
        accepted = rows.accept(batch, sampled.int().numpy(), batch.sampled_sizes)
        ends = np.cumsum(accepted.num_accepted + 1)
        for slot, tokens in enumerate(np.split(accepted.token_ids, ends[:-1])):
            found[slot] += tokens.tolist()
            position = len(PROMPT) + len(found[slot])
            likely = logits[position : position + most].argmax(1)
            slots.set_drafts(slot, likely.int().numpy())
        step = make_step([(slot, 1, []) for slot in range(ROWS)])
        step.num_drafts = most
    return np.array([tokens[:NUM_TOKENS] for tokens in found], np.int32)


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
@pytest.mark.parametrize("most", [2, 5])
def test_chi_square_against_the_models_distribution(params: dict[str, Any], most: int) -> None:
    torch.manual_seed(most)
    logits = torch.randn(40, VOCAB) * 2
    tokens = outputs(logits, params, most)
    assert np.array_equal(tokens, outputs(logits, params, 0)), "drafts have changed tokens"
    wide = logits / params["temperature"]
    kept = mask_top_k_top_p_min_p(
        wide,
        torch.full((40,), params.get("top_k", 0)),
        torch.full((40,), params.get("top_p", 1.0)),
        torch.full((40,), params.get("min_p", 0.0)),
    )
    wanted = kept.softmax(-1).double().numpy()
    for index in range(NUM_TOKENS):
        expected = wanted[len(PROMPT) + index] * ROWS
        counts = np.bincount(tokens[:, index], minlength=VOCAB)
        assert counts[expected == 0].sum() == 0
        common = expected >= 5  # rarer ones together, as usual for the test
        seen = np.append(counts[common], counts[~common].sum())
        due = np.append(expected[common], expected[~common].sum())
        seen, due = seen[due > 0], due[due > 0]
        freedom = len(due) - 1
        statistic = ((seen - due) ** 2 / due).sum()
        # The quantile of one in ten thousand (Wilson and Hilferty 1931).
        part = 2 / (9 * freedom) if freedom else 0.0
        assert statistic <= freedom * (1 - part + 3.72 * part**0.5) ** 3 + 1e-6
