"""Rows that may sample some tokens only, beside plain ones, in a runner driven step by step."""

from __future__ import annotations

import numpy as np
import pytest

from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import LogprobColumns, StepInput, StepMasks
from tests.e2e.models import random_prompts
from tests.unit.executor.steps import Request, make_step, schedule
from tests.unit.executor.test_model_runner import VOCAB, run

HELD = Controls(has_grammar=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def words_of(allowed: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return masks that allow these tokens, for a model of 331."""
    masks = np.zeros((len(allowed), -(-331 // 32) * 32), np.uint8)
    for mask, tokens in zip(masks, allowed, strict=True):
        mask[tokens] = 1
    return np.packbits(masks, axis=1, bitorder="little").view(np.int32).reshape(-1)


def run_held(runner: Runner, requests: list[Request], budget: int = 40) -> list[bytes]:
    """Run requests, of which some have a grammar, and return the logprobs of the steps.

    Request i has slot i. Requests with a grammar may sample 40 + step or 80 + slot.
    """
    logprobs, num_masks = [], 0
    for step, sampling in schedule(requests, budget, 16):
        held = [
            row
            for row, slot in enumerate(step.slots.tolist())
            if requests[slot].controls.has_grammar and requests[slot] in sampling
        ]
        step.awaits_masks = int(bool(held))
        indices = np.arange(num_masks, num_masks + len(held), dtype=np.int32)
        masks = StepMasks(
            step.step_id,
            num_masks,
            np.array(held, np.int32),
            indices,
            words_of([[40 + step.step_id, 80 + int(step.slots[row])] for row in held]),
        )
        num_masks += len(held)

        def give(masks: StepMasks = masks) -> StepMasks:
            return masks

        output = runner.execute(step, give).wait()
        logprobs.append(output.logprobs.tobytes())
        for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
            if request.controls.has_grammar:
                assert token in (40 + step.step_id, 80 + requests.index(request))
            request.output.append(token)
    return logprobs


def plain_requests() -> list[Request]:
    return [
        Request(p, 8, temperature=[0.0, 0.9][i % 2], top_k=[0, 9][i % 2], seed=i)
        for i, p in enumerate(random_prompts(8, VOCAB))
    ]


def test_held_rows_keep_to_their_masks_and_no_other_row_changes(runner: ModelRunner) -> None:
    """Rows with other controls too, which are special rows, sample the same tokens.

    Their penalty applies to nothing and so changes nothing.
    """
    expected = run(runner, plain_requests())
    for controls in (
        HELD,
        Controls(has_grammar=True, logit_bias={VOCAB - 1: 1.0}),
        Controls(has_grammar=True, logprobs=2),
    ):
        requests = [
            r
            for plain in plain_requests()
            for r in (
                plain,
                Request(plain.prompt, 8, plain.temperature, seed=plain.seed, controls=controls),
            )
        ]
        logprobs = run_held(runner, requests)
        assert [r.output for r in requests[::2]] == expected
        held = [r.output for r in requests[1::2]]
        if controls is HELD:
            alone = held
        assert held == alone
        told = sum(len(LogprobColumns.unpack(column).keys) for column in logprobs if column)
        assert told == (64 if controls.logprobs >= 0 else 0)


def step_of(
    step_id: int, rows: list[tuple[int, int, list[int]]], entering: dict[int, Request]
) -> StepInput:
    step = make_step(rows, entering, step_id)
    step.awaits_masks = 1
    return step


def test_masks_are_kept_by_their_indices(runner: ModelRunner) -> None:
    entering = {slot: Request([1, 2, 3], 9, controls=HELD) for slot in (0, 1)}
    none = np.empty(0, np.int32)

    def execute(
        step: StepInput, first_new: int, indices: list[int], allowed: list[list[int]]
    ) -> list[int]:
        words = words_of(allowed) if allowed else none
        masks = StepMasks(
            step.step_id,
            first_new,
            np.arange(len(indices), dtype=np.int32),
            np.array(indices, np.int32),
            words,
        )
        tokens: list[int] = runner.execute(step, lambda: masks).wait().token_ids.tolist()
        return tokens

    assert execute(step_of(0, [(0, 3, [0]), (1, 3, [1])], entering), 0, [0, 1], [[10], [11]]) == [
        10,
        11,
    ]
    assert execute(step_of(1, [(0, 1, []), (1, 1, [])], {}), 2, [1, 0], []) == [11, 10]
    assert execute(step_of(2, [(0, 1, []), (1, 1, [])], {}), 2, [2, 1], [[12]]) == [12, 11]
    assert execute(step_of(3, [(0, 1, []), (1, 1, [])], {}), 0, [0, 0], [[13]]) == [13, 13], (
        "begun anew"
    )


def test_a_plain_request_in_the_slot_of_one_with_a_grammar_is_plain(runner: ModelRunner) -> None:
    plain = Request([5, 6, 7], 4)
    expected = run(runner, [plain])[0]
    held = Request([5, 6, 7], 4, controls=HELD)
    run_held(runner, [held])
    assert run(runner, [Request([5, 6, 7], 4)])[0] == expected != held.output
