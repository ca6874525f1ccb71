"""The sampler on whole batches: a request's token depends on no other row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.executor.sampling.sampler import Sampler
from sidestep.ipc.transport.step import StepInput
from tests.unit.executor.steps import Request, make_step

VOCAB = 101


def sampled(requests: list[Request], logits: Tensor) -> list[int]:
    """Return one token for each request; all prompts end in this step."""
    state = HostTables(len(requests), 64, 16)
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt) > 1)
    step = make_step([(i, len(requests[i].prompt), [i]) for i in order], dict(enumerate(requests)))
    state.apply(step)
    tokens = sample_step(state, step, logits[order])
    return [token for _, token in sorted(zip(order, tokens, strict=True))]


def sample_step(state: HostTables, step: StepInput, logits: Tensor) -> list[int]:
    """Make a step in which all rows sample."""
    batch = make_batch(state, step, 16)
    return list(Sampler(state)(logits, batch.slots, batch.seq_lens).tolist())


def random_requests() -> list[Request]:
    return [
        Request([1], 1),
        Request([1, 2], 1, temperature=1.0, seed=3),
        Request([1], 1, temperature=0.7, top_k=5, seed=2**62),
        Request([4, 4, 4], 1, temperature=1.3, top_p=0.6, seed=-9),
        Request([1], 1, temperature=2.0, min_p=0.1, seed=0),
        Request([1], 1, temperature=0.0, top_k=3, top_p=0.5),
        Request([1], 1, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=77),
    ]


def test_a_request_gets_the_same_token_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        requests, logits = random_requests(), torch.randn(7, VOCAB) * 3
        together = sampled(requests, logits)
        assert together == [sampled([r], logits[i : i + 1])[0] for i, r in enumerate(requests)]
        assert together[0] == int(logits[0].argmax())
        assert together[5] == int(logits[5].argmax()), "filters do not change what is greedy"


def test_tokens_stay_within_the_filters() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB)
    best = set(logits[0].topk(4).indices.tolist())
    got = {
        sampled([Request([1], 1, temperature=5.0, top_k=4, seed=seed)], logits)[0]
        for seed in range(100)
    }
    assert got == best


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.1}],
    ids=lambda filters: next(iter(filters)),
)
def test_temperature_last_filters_without_temperature(filters: dict[str, Any]) -> None:
    """Draw as if the filters' logits alone were there; the temperature is high, then low."""
    # The first three of these weigh 0.6, 0.23 and 0.1, and the others 0.02 or less.
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :6] = torch.tensor([0.6, 0.23, 0.1, 0.02, 0.02, 0.02]).log()
    left = logits.clone()
    left[0, 3:] = -torch.inf
    for temperature in (2.0, 0.5):
        for seed in range(60):
            plain = Request([1], 1, temperature, seed=seed)
            last = replace(plain, temperature_last=True, **filters)
            assert sampled([last], logits) == sampled([plain], left)


def test_seeds_and_positions_both_matter() -> None:
    logits = torch.zeros(1, VOCAB)
    by_seed = {
        sampled([Request([1], 1, temperature=1.0, seed=seed)], logits)[0] for seed in range(40)
    }
    by_position = {
        sampled([Request([1] * n, 1, temperature=1.0, seed=5)], logits)[0] for n in range(1, 15)
    }
    assert len(by_seed) > 20
    assert len(by_position) > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = torch.full((3, VOCAB), -9.0)
    logits[:, 7], logits[:, 8], logits[:, 9] = 40.0, 30.0, 20.0
    requests = [
        Request([1], 4, temperature, min_tokens=1, stop_ids=[7, 8]),
        Request([1], 4, temperature),
        Request([1], 4, temperature, min_tokens=2, stop_ids=[7]),
    ]
    before = logits.clone()
    assert sampled(requests, logits) == [9, 7, 8]
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_stop_tokens_are_free_from_the_token_after_min_tokens_on() -> None:
    state = HostTables(1, 64, 16)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    entering = {0: Request([1, 2, 3], 9, min_tokens=2, stop_ids=[7])}
    tokens = []
    steps: list[list[tuple[int, int, list[int]]]] = [[(0, 3, [0])], [(0, 1, [])], [(0, 1, [])]]
    for rows in steps:
        step = make_step(rows, entering)
        entering = {}
        state.apply(step)
        tokens += sample_step(state, step, logits)
    assert tokens[0] != 7
    assert tokens[1] != 7
    assert tokens[2] == 7


def test_a_preempted_request_counts_its_old_outputs() -> None:
    """Let a request come back with its outputs among its known tokens.

    min_tokens still counts from the prompt's end.
    """
    state = HostTables(1, 64, 16)
    step = make_step([(0, 5, [0])], {0: Request([1, 2, 3, 4, 5], 9, min_tokens=2, stop_ids=[7])})
    step.entering["num_prompt"][:] = 3
    state.apply(step)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    assert sample_step(state, step, logits) == [7]
