"""Rows with controls beside plain ones, in a runner driven step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.runner.largest_step import ALL_CONTROLS, largest_step
from sidestep.ipc.params.logits_controls import Controls
from tests.e2e.models import random_prompts, write_model
from tests.unit.executor.steps import Request, make_step
from tests.unit.executor.test_model_runner import VOCAB, make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_requests() -> list[Request]:
    return [
        Request(p, 10, temperature=[0.0, 0.9][i % 2], top_k=[0, 9][i % 2], seed=i)
        for i, p in enumerate(random_prompts(8, VOCAB))
    ]


def test_biased_rows_follow_their_bias_and_no_other_row_changes(runner: ModelRunner) -> None:
    expected = run(runner, plain_requests())
    always = Controls(logit_bias={7: 100.0, 9: -100.0})
    requests = [
        r
        for plain in plain_requests()
        for r in (
            plain,
            Request(plain.prompt, 10, plain.temperature, seed=plain.seed, controls=always),
        )
    ]
    got = run(runner, requests)
    assert got[::2] == expected
    assert all(output == [7] * 10 for output in got[1::2])


def test_a_plain_request_in_the_slot_of_one_with_controls_is_plain(runner: ModelRunner) -> None:
    first = plain_requests()[0]
    expected = run(runner, [first])[0]
    biased = Request(first.prompt, 10, controls=Controls(logit_bias={7: 100.0}))
    assert run(runner, [biased])[0] == [7] * 10
    assert run(runner, [plain_requests()[0]])[0] == expected


def test_min_tokens_holds_for_special_rows_too(runner: ModelRunner) -> None:
    """The bias makes 7 the best token by far; it must not come before the third output."""
    request = Request(
        [1, 2, 3], 4, controls=Controls(logit_bias={7: 100.0, 8: 50.0}), min_tokens=2, stop_ids=[7]
    )
    assert run(runner, [request])[0] == [8, 8, 7, 7]


def test_more_special_rows_than_are_copied_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidestep.executor.sampling.special_rows.MOST_ROWS", 4)
    runner = make_runner(write_model("llama-gqa", tmp_path))
    requests = [Request([1, 2, 3], 3, controls=Controls(logit_bias={i: 100.0})) for i in range(11)]
    assert run(runner, requests) == [[i] * 3 for i in range(11)]


def test_a_step_whose_special_rows_do_not_sample(runner: ModelRunner) -> None:
    request = Request([1] * 9, 1, controls=Controls(logit_bias={7: 100.0}))
    assert runner.execute(make_step([(0, 4, [0])], {0: request})).wait().token_ids.tolist() == []
    assert runner.execute(make_step([(0, 5, [])])).wait().token_ids.tolist() == [7]


def test_the_largest_step_with_all_controls(tmp_path: Path) -> None:
    """Run the step by which a GPU's runner finds out how much memory it needs.

    A plain step afterwards leaves no trace of it.
    """
    runner = make_runner(write_model("llama-gqa", tmp_path))
    assert runner._last is not None
    for controls, told in ((ALL_CONTROLS, True), (Controls(), False)):
        step = largest_step(runner._limits, 256, 16, controls)
        step.block_ids[:] = np.arange(len(step.block_ids))
        output = runner.execute(step).wait()
        assert len(output.token_ids) == runner._limits.max_num_seqs
        assert (len(output.logprobs) > 0, len(output.prompt_logprobs) > 0) == (told, told)
        assert (repr(runner._last.special) == "SpecialRows(slots [])") != told
