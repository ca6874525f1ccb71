"""Beam search as its user sees it, over a core that the test plays."""

from __future__ import annotations

import asyncio

import pytest

from sidestep import (
    AsyncLLM,
    BeamSearchOutput,
    BeamSearchParams,
    EngineDeadError,
    RequestError,
    ValidationError,
)
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import Beam, Dead, Finished, FinishReason, Outputs, pack_ids
from tests.unit.frontend.fakes import FakeChannel

EOS = 0
PARAMS = BeamSearchParams(beam_width=2, max_tokens=9, length_penalty=0.5)


async def begin(llm: AsyncLLM, params: BeamSearchParams = PARAMS) -> asyncio.Task[BeamSearchOutput]:
    task = asyncio.create_task(llm.beam_search([5, 6], params, "mine"))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def end(
    channel: FakeChannel,
    reason: FinishReason = FinishReason.STOP,
    stop_reason: str | None = None,
    error: str | None = None,
    beams: bool = True,
) -> None:
    found = [
        Beam(token_ids=pack_ids([70, 71, EOS]), logprob=-1.5, score=-0.5, reason=FinishReason.STOP),
        Beam(token_ids=pack_ids([70, 72]), logprob=-2.0, score=-1.0, reason=FinishReason.LENGTH),
    ]
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            finished=[
                Finished(
                    handle=0,
                    reason=reason,
                    stop_reason=stop_reason,
                    error=error,
                    beams=found if beams else [],
                )
            ],
        )
    )


@pytest.mark.parametrize("keeps_end", [False, True])
async def test_what_was_found_comes_back_in_order(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer, keeps_end: bool
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9, include_stop_str_in_output=keeps_end)
    task = await begin(llm, params)
    (message,) = channel.added
    assert (
        message.beam_search == params
        and message.sampling.max_tokens == 9
        and message.sampling.n == 1
    )
    end(channel)
    output = await task
    first, second = output.sequences
    assert first.tokens == [5, 6, 70, 71, *([EOS] if keeps_end else [])]
    assert first.text == tokenizer.decode(first.tokens[2:], skip_special_tokens=not keeps_end)
    assert (first.score, first.cum_logprob, first.finish_reason, first.stop_reason) == (
        -0.5,
        -1.5,
        "stop",
        None,
    )
    assert (second.tokens, second.finish_reason) == ([5, 6, 70, 72], "length")
    assert output.prompt_token_ids == [5, 6] and len(llm._outputs) == 0


async def test_a_deadline_cuts_short_what_has_not_ended(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    task = await begin(llm)
    end(channel, FinishReason.ABORT, "deadline")
    output = await task
    assert [(s.finish_reason, s.stop_reason) for s in output.sequences] == [
        ("stop", None),
        ("abort", "deadline"),
    ]


async def test_an_aborted_search_has_found_nothing(llm: AsyncLLM, channel: FakeChannel) -> None:
    task = await begin(llm)
    await llm.abort("mine")
    assert (await task).sequences == [] and channel.aborted == [0]


async def test_a_search_that_is_cancelled_ends_in_the_engine(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    task = await begin(llm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.aborted == [0] and len(llm._outputs) == 0


async def test_failures_reach_the_caller(llm: AsyncLLM, channel: FakeChannel) -> None:
    task = await begin(llm)
    end(channel, FinishReason.ERROR, error="beam_width: too many", beams=False)
    with pytest.raises(RequestError, match="beam_width: too many"):
        await task
    task = await begin(llm)
    channel.say(Dead(cause="power cut"))
    with pytest.raises(EngineDeadError, match="power cut"):
        await task


async def test_wrong_calls_are_named(llm: AsyncLLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="params: must be BeamSearchParams"):
        await llm.beam_search([5], {"beam_width": 2})  # type: ignore[arg-type]  # no max_tokens
    with pytest.raises(ValidationError, match="prompt"):
        await llm.beam_search([], PARAMS)
