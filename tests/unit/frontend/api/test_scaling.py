"""Test-time scaling over a core that the test plays.

The tests cover the choice, the requests to the engine, and early ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sidestep import (
    AsyncLLM,
    CompletionOutput,
    SamplingParams,
    ValidationError,
    best_of_n,
    self_consistency,
)
from sidestep.frontend.api.scaling import critique_and_revise
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import FinishReason
from tests.unit.frontend.fakes import FakeChannel, llm_of

LENGTH = FinishReason.LENGTH


@pytest.fixture
def llm(channel: FakeChannel, tokenizer: Tokenizer) -> Any:
    made = llm_of(channel, tokenizer, max_model_len=2000)
    yield made
    made.shutdown()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def sent(channel: FakeChannel, count: int) -> None:
    """Wait until `count` requests have been sent.

    Templates are rendered at once, long texts are tokenised in a thread.
    """
    while len(channel.added) < count:
        await asyncio.sleep(0.001)


def say_texts(
    channel: FakeChannel, tokenizer: Tokenizer, texts: Sequence[str], first: int = 0
) -> None:
    """Let each completion be one text and its end."""
    for handle, text in enumerate(texts, first):
        ids = tokenizer.encode(text, False)
        for token in ids[:-1]:
            channel.say_tokens((handle, token))
        channel.say_tokens((handle, ids[-1]), finished=[(handle, LENGTH)])


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_completion_with_the_best_score_is_chosen(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer, is_async: bool
) -> None:
    def score(completion: CompletionOutput) -> float:
        return len(completion.text)

    async def later(completion: CompletionOutput) -> float:
        await asyncio.sleep(0)
        return score(completion)

    call = asyncio.create_task(
        best_of_n(llm, [5, 6], 3, later if is_async else score, SamplingParams(seed=4))
    )
    await settle()
    (message,) = channel.added
    assert message.sampling.n == 3 and message.sampling.seed == 4
    say_texts(channel, tokenizer, ["ab", "abcdef", "abc"])
    found = await call
    assert found.best.text == "abcdef" and found.best.index == 1 and found.scores == [2, 6, 3]


async def test_a_score_that_fails_fails_the_call(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    def score(completion: CompletionOutput) -> float:
        raise KeyError("no such test")

    call = asyncio.create_task(best_of_n(llm, [5, 6], 2, score))
    await settle()
    say_texts(channel, tokenizer, ["a", "b"])
    with pytest.raises(KeyError, match="no such test"):
        await call
    assert len(llm._outputs) == 0


async def test_a_vote_ends_when_it_is_decided(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    call = asyncio.create_task(self_consistency(llm, [5, 6], 5, lambda text: text[:1] or None))
    await settle()
    say_texts(channel, tokenizer, ["ab", "b"])
    await settle()
    assert channel.aborted == []
    say_texts(channel, tokenizer, ["ac", "ad"], first=2)
    vote = await call
    assert vote.answer == "a" and vote.votes == {"a": 3, "b": 1} and vote.num_stopped == 1
    assert channel.aborted == [4] and len(llm._outputs) == 0


async def test_completions_without_an_answer_do_not_vote(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    call = asyncio.create_task(self_consistency(llm, [5, 6], 3, lambda text: None))
    await settle()
    say_texts(channel, tokenizer, ["a", "b", "c"])
    vote = await call
    assert vote.answer is None and not vote.votes and vote.num_stopped == 0


async def test_a_vote_that_is_cancelled_ends_its_request(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    call = asyncio.create_task(self_consistency(llm, [5, 6], 3, lambda text: text))
    await settle()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert channel.aborted == [0, 1, 2]


async def test_each_turn_of_a_revision_continues_the_conversation(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    call = asyncio.create_task(
        critique_and_revise(
            llm, [{"role": "user", "content": "hi"}], rounds=3, is_good=lambda text: text == "fine"
        )
    )
    for i, text in enumerate(["one", "bad", "two", "fine"]):
        await sent(channel, i + 1)
        say_texts(channel, tokenizer, [text], first=i)
    made = await call
    assert (made.answer, made.drafts, made.critiques) == ("two", ["one", "two"], ["bad", "fine"])
    prompts = [
        tokenizer.decode(list(memoryview(m.prompt_token_ids).cast("i")), False)
        for m in channel.added
    ]
    for before, after in zip(prompts, prompts[1:], strict=False):
        assert after.startswith(before)
    assert "bad" in prompts[2] and "one" in prompts[1]


async def test_a_revision_has_at_least_one_round(llm: AsyncLLM) -> None:
    with pytest.raises(ValidationError, match="rounds"):
        await critique_and_revise(llm, [{"role": "user", "content": "hi"}], rounds=0)


async def test_without_parameters_the_model_s_defaults_hold(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    llm._inputs.default_sampling = SamplingParams(top_k=20, max_tokens=9)
    call = asyncio.create_task(self_consistency(llm, [5, 6], 2, str))
    await settle()
    (message,) = channel.added
    sampling = message.sampling
    assert (sampling.n, sampling.top_k, sampling.max_tokens) == (2, 20, 9)
    say_texts(channel, tokenizer, ["a", "a"])
    assert (await call).answer == "a"
