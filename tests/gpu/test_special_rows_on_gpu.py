"""Rows with controls on a GPU, captured and eager.

The rows beside them do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.transport.step import LogprobColumns
from tests.e2e.models import load_reference, random_prompts, write_model
from tests.e2e.output.control import reference_greedy
from tests.gpu.test_gpu_runner import VOCAB, make_runner
from tests.unit.executor.steps import Request, schedule

pytestmark = pytest.mark.gpu


def run(
    runner: GpuRunner, requests: Sequence[Request], depth: int = 2, budget: int = 90
) -> list[Any]:
    """Run the requests with `depth` steps in flight. Return all outputs.

    The requests get their tokens.
    """
    flying: list[Any] = []
    outputs = []

    def collect() -> None:
        pending, sampling = flying.pop(0)
        output = pending.wait()
        outputs.append(output)
        for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
            request.output.append(token)

    for step, sampling in schedule(requests, budget, 16):
        flying.append((runner.execute(step), sampling))
        if len(flying) == depth:
            collect()
    while flying:
        collect()
    return outputs


def plain_requests() -> list[Request]:
    return [
        Request(p, 9, temperature=[0.0, 0.9][i % 2], top_k=[0, 9, 0][i % 3], seed=i)
        for i, p in enumerate(random_prompts(10, VOCAB))
    ]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_rows_do_not_change_beside_special_ones(
    dtype: str, eager: bool, tmp_path: Path
) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path), dtype, enforce_eager=eager)
    plain, mixed = plain_requests(), plain_requests()
    controls = [
        Controls(logit_bias={7: 100.0}),
        Controls(allowed_token_ids=[7]),
        Controls(logprobs=3),
        Controls(presence_penalty=0.5, repetition_penalty=1.1),
        Controls(bad_words=[[1, 2], [3]]),
    ]
    others = [
        Request(p.prompt, 9, p.temperature, seed=p.seed, controls=controls[i % 5])
        for i, p in enumerate(mixed)
    ]
    run(runner, [r for pair in zip(plain, plain_requests(), strict=True) for r in pair])
    run(runner, [r for pair in zip(mixed, others, strict=True) for r in pair])
    # The same numbers of rows and tokens, so that the same products are chosen.
    assert [r.output for r in mixed] == [r.output for r in plain]
    assert all(r.output == [7] * 9 for i, r in enumerate(others) if i % 5 < 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asking_for_logprobs_changes_no_token(dtype: str, tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path), dtype)
    plain, asking = plain_requests(), plain_requests()
    for request in asking:
        request.controls = Controls(logprobs=2)
    run(runner, plain)
    run(runner, asking)
    assert [r.output for r in asking] == [r.output for r in plain]


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_equal_plain_arithmetic_on_transformers_logits(
    depth: int, tmp_path: Path
) -> None:
    path = write_model("llama-gqa", tmp_path)
    model = load_reference(path)
    requests, expected = [], []
    for i, prompt in enumerate(random_prompts(12, VOCAB, longest=40)):
        cases: list[dict[str, Any]] = [
            {"repetition_penalty": 4.0},
            {"frequency_penalty": 1.3, "presence_penalty": 2.0},
            {"allowed_token_ids": [3, 200, 100, 7], "repetition_penalty": 9.0},
        ]
        penalties = cases[i % 3]
        requests.append(Request(prompt, 10, controls=Controls(**penalties)))
        expected.append(
            reference_greedy(
                model, prompt, SamplingParams(temperature=0, max_tokens=10, **penalties)
            )
        )
    run(make_runner(path, "float32"), requests, depth)
    assert [r.output for r in requests] == expected


def test_more_special_rows_than_are_copied_at_a_time_and_min_tokens(tmp_path: Path) -> None:
    """Copy 63 rows of 64 and one more part, in captured steps."""
    runner = make_runner(write_model("llama-gqa", tmp_path), "bfloat16")
    from sidestep.executor.sampling import special_rows

    before, special_rows.MOST_ROWS = special_rows.MOST_ROWS, 32
    try:
        requests = [
            Request(
                [1, 2, 3],
                4,
                controls=Controls(logit_bias={i: 100.0, 99: 50.0}),
                min_tokens=2,
                stop_ids=[i],
            )
            for i in range(50)
        ]
        run(runner, requests)
    finally:
        special_rows.MOST_ROWS = before
    assert [r.output for r in requests] == [[99, 99, i, i] for i in range(50)]


@pytest.mark.parametrize("eager", [False, True])
def test_logprobs_of_outputs_and_prompts(eager: bool, tmp_path: Path) -> None:
    path = write_model("llama-gqa", tmp_path)
    model = load_reference(path)
    prompts = [p for p in random_prompts(9, VOCAB, longest=60) if len(p) > 1]
    requests = [Request(p, 5, controls=Controls(logprobs=2, prompt_logprobs=1)) for p in prompts]
    runner = make_runner(path, "float32", enforce_eager=eager)
    found: dict[int, list[float]] = {i: [] for i in range(len(prompts))}
    told: dict[int, dict[int, float]] = {i: {} for i in range(len(prompts))}
    steps = schedule(requests, 40, 16)
    for step, sampling in steps:
        output = runner.execute(step).wait()
        slots = step.slots.tolist()
        for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
            request.output.append(token)
        numbers = {id(r): i for i, r in enumerate(requests)}
        for key, _, values in tokens_of(output.logprobs):
            found[numbers[id(sampling[key])]].append(values)
        for key, position, values in tokens_of(output.prompt_logprobs):
            told[slots[key]][position] = values
    for i, request in enumerate(requests):
        with torch.inference_mode():
            values = (
                model(torch.tensor([[*request.prompt, *request.output]]))
                .logits[0]
                .float()
                .log_softmax(-1)
            )
        tokens, length = [*request.prompt, *request.output], len(request.prompt)
        expected = [float(values[at - 1, tokens[at]]) for at in range(1, len(tokens))]
        np.testing.assert_allclose(
            [told[i][at] for at in range(1, length)], expected[: length - 1], atol=1e-3
        )
        np.testing.assert_allclose(found[i], expected[length - 1 :], atol=1e-3)


def tokens_of(column: Any) -> list[tuple[int, int, float]]:
    """Return key, position and the token's own logprob."""
    if not len(column):
        return []
    columns = LogprobColumns.unpack(column)
    starts = np.cumsum(columns.sizes) - columns.sizes
    return list(
        zip(
            columns.keys.tolist(),
            columns.positions.tolist(),
            columns.logprobs[starts].tolist(),
            strict=True,
        )
    )
