"""A model's engine after an exception in a step: each request goes on with its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sidestep import (
    LLM,
    EngineDeadError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.e2e.output.failing_processor import TARGET

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
SHARED = "def get_name(self):\n    return self.name\n\n\ndef get_"
PROMPTS = [SHARED + name for name in ("age", "size", "name", "kind", "name_of_the_last", "a")]


def params(plan: dict[str, Any] | None = None) -> list[SamplingParams]:
    """Return the parameters of PROMPTS; the last request has the plan."""
    plain: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.8}
    return [
        SamplingParams(**plain, seed=1),
        SamplingParams(**plain, seed=2, n=3),
        SamplingParams(**plain, seed=3, logprobs=2, repetition_penalty=1.3),
        SamplingParams(
            max_tokens=16, seed=4, structured_outputs=StructuredOutputsParams(regex="[a-z_]{30}")
        ),
        SamplingParams(**plain, seed=5, prompt_logprobs=1),
        SamplingParams(**plain, seed=6, extra_args={"FailingProcessor": plan or {}}),
    ]


def serve(plan: dict[str, Any] | None = None, **options: Any) -> list[RequestOutput]:
    """Return the outputs of PROMPTS, of an engine in which the plan has failed once."""
    with LLM(**CPU, logits_processors=[TARGET], **options) as llm:
        outputs = llm.generate(PROMPTS, params(plan), use_tqdm=False)
        stats = llm.get_stats()
    cause = "oom" if plan and plan.get("oom") else "exception"
    assert stats[f"soft_resets_{cause}"] == (plan is not None)
    assert stats["kv_cache_usage"] == 0
    return outputs


def choices(outputs: Sequence[RequestOutput]) -> list[list[tuple[str, list[int], Any]]]:
    return [
        [(choice.text, list(choice.token_ids), told(choice.logprobs)) for choice in output.outputs]
        for output in outputs
    ]


def told(logprobs: Any) -> Any:
    """Return the tokens of log-probabilities, with values as far as other batches give them."""
    return logprobs and [
        sorted((token, pytest.approx(one.logprob, abs=1e-3)) for token, one in place.items())
        for place in logprobs
    ]


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """Return the outputs of an engine without a failure."""
    return serve()


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, {"in": "sampled", "at": 0}),
        ({}, {"in": "apply", "at": 7, "oom": True}),
        (
            {"async_scheduling": False, "max_num_batched_tokens": 8, "max_num_seqs": 8},
            {"in": "sampled", "at": 5},
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            {"in": "sampled", "at": 5},
        ),
    ],
    ids=["prompts", "memory", "chunks", "speculation"],
)
def test_the_outputs_are_those_of_an_engine_without_a_failure(
    options: dict[str, Any], plan: dict[str, Any], expected: list[RequestOutput]
) -> None:
    found = serve(plan, **options)
    assert choices(found) == choices(expected)
    assert [len(output.prompt_logprobs or ()) for output in found] == [
        len(output.prompt_logprobs or ()) for output in expected
    ]


@pytest.mark.parametrize("place", ["enter", "apply"])
def test_the_request_to_blame_ends_alone(place: str, expected: list[RequestOutput]) -> None:
    with LLM(**CPU, logits_processors=[TARGET]) as llm:
        with pytest.raises(RequestError, match=f"ValueError: call 0 of {place} fails"):
            llm.generate(PROMPTS[5], params({"in": place, "at": 0})[5], use_tqdm=False)
        found = llm.generate(PROMPTS[:5], params()[:5], use_tqdm=False)
    assert choices(found) == choices(expected[:5])


@pytest.mark.parametrize("place", ["enter", "apply"])
def test_ranks_go_on_together_and_the_request_to_blame_ends_alone(place: str) -> None:
    """All ranks raise at the same place of the step, so none waits for another."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "restart_limit": 0}
    with LLM(**CPU, logits_processors=[TARGET], **options) as llm:
        expected = llm.generate(PROMPTS[:5], params()[:5], use_tqdm=False)
        with pytest.raises(RequestError, match=f"ValueError: call 0 of {place} fails"):
            llm.generate(PROMPTS[5], params({"in": place, "at": 0})[5], use_tqdm=False)
        found = llm.generate(PROMPTS, params({"in": "sampled", "at": 5}), use_tqdm=False)
        assert llm.get_stats()["soft_resets_exception"] == 2
    assert choices(found[:5]) == choices(expected)


def test_no_stage_of_a_pipeline_goes_on() -> None:
    """A stage that has not raised may wait within the step for the one that has."""
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "restart_limit": 0}
    with (
        LLM(**CPU, logits_processors=[TARGET], **options) as llm,
        pytest.raises(EngineDeadError, match="ValueError: call 1 of sampled fails"),
    ):
        llm.generate(PROMPTS, params({"in": "sampled", "at": 1}), use_tqdm=False)
