"""Several completions of one prompt as their reader sees them, over a core that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sidestep import AsyncLLM, RequestError, RequestOutput, RequestOutputKind, SamplingParams
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import QueueFullError
from sidestep.ipc.transport.messages import (
    Finished,
    FinishReason,
    Outputs,
    Started,
    VerifiedDrafts,
)
from tests.unit.frontend.fakes import FakeChannel

LENGTH = FinishReason.LENGTH


def stream(
    llm: AsyncLLM, kind: RequestOutputKind, n: int = 3, **more: Any
) -> AsyncGenerator[RequestOutput, None]:
    return llm.generate(
        [5, 6],
        SamplingParams(n=n, max_tokens=9, output_kind=kind, seed=1, **more),
        request_id="mine",
    )


async def begin(reader: AsyncGenerator[RequestOutput, None]) -> asyncio.Task[RequestOutput]:
    task = asyncio.ensure_future(anext(reader))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def seen(output: RequestOutput) -> list[tuple[int, list[int], str | None]]:
    return [(c.index, c.token_ids, c.finish_reason) for c in output.outputs]


async def test_one_message_asks_for_all_choices(llm: AsyncLLM, channel: FakeChannel) -> None:
    reader = stream(llm, RequestOutputKind.DELTA)
    task = await begin(reader)
    (message,) = channel.added
    assert (message.handle, message.sampling.n) == (0, 3)
    assert (llm.num_waiting, llm.num_waiting_tokens) == (3, 2), "the prompt is computed once"
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            started=[
                Started(handle=handle, num_cached_tokens=1, scheduled=2.0) for handle in range(3)
            ],
        )
    )
    channel.say_tokens((0, 70))
    output = await task
    assert seen(output) == [(0, [70], None)] and output.num_cached_tokens == 1
    assert llm.num_waiting == llm.num_waiting_tokens == 0
    other = await begin(llm.generate([7]))
    assert channel.added[1].handle == 3
    other.cancel()
    await reader.aclose()


async def test_deltas_hold_the_choices_with_something_new(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    reader = stream(llm, RequestOutputKind.DELTA)
    task = await begin(reader)
    channel.say_tokens((0, 70))
    first = await task
    channel.say_tokens((0, 71), (1, 80), (2, 90), finished=[(2, LENGTH)])
    second = await anext(reader)
    channel.say_tokens((1, 81), finished=[(1, LENGTH), (0, LENGTH)])
    third = await anext(reader)
    assert [seen(o) for o in (first, second, third)] == [
        [(0, [70], None)],
        [(0, [71], None), (1, [80], None), (2, [90], "length")],
        [(0, [], "length"), (1, [81], "length")],
    ]
    assert [first.finished, second.finished, third.finished] == [False, False, True]
    assert third.metrics.num_generation_tokens == 5
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


async def test_cumulative_outputs_hold_all_choices(llm: AsyncLLM, channel: FakeChannel) -> None:
    reader = stream(llm, RequestOutputKind.CUMULATIVE)
    task = await begin(reader)
    channel.say_tokens((1, 80))
    assert seen(await task) == [(0, [], None), (1, [80], None), (2, [], None)]
    channel.say_tokens((0, 70), (1, 81), (2, 90), finished=[(0, LENGTH), (2, LENGTH)])
    assert seen(await anext(reader)) == [
        (0, [70], "length"),
        (1, [80, 81], None),
        (2, [90], "length"),
    ]
    channel.say_tokens((1, 82), finished=[(1, LENGTH)])
    last = await anext(reader)
    assert (
        seen(last) == [(0, [70], "length"), (1, [80, 81, 82], "length"), (2, [90], "length")]
        and last.finished
    )


async def test_a_final_output_comes_when_all_have_ended(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    reader = stream(llm, RequestOutputKind.FINAL_ONLY)
    task = await begin(reader)
    channel.say_tokens((0, 70), (1, 80), (2, 90), finished=[(0, LENGTH), (2, LENGTH)])
    channel.say_tokens((1, 81), finished=[(1, LENGTH)])
    assert seen(await task) == [(0, [70], "length"), (1, [80, 81], "length"), (2, [90], "length")]


async def test_the_drafts_of_choices_are_added(llm: AsyncLLM, channel: FakeChannel) -> None:
    task = await begin(stream(llm, RequestOutputKind.FINAL_ONLY))
    drafts = [
        VerifiedDrafts(num_drafts=i, num_draft_tokens=3 * i, num_accepted_tokens=2 * i)
        for i in (1, 2, 0)
    ]
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            finished=[
                Finished(handle=handle, reason=LENGTH, drafts=each)
                for handle, each in enumerate(drafts)
            ],
        )
    )
    metrics = (await task).metrics
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 9, 6)
    assert metrics.acceptance_length == 3.0


@pytest.mark.parametrize("ended", [[], [1], [0, 2]])
async def test_leaving_ends_those_that_have_not_ended_in_one_message(
    llm: AsyncLLM, channel: FakeChannel, ended: list[int]
) -> None:
    reader = stream(llm, RequestOutputKind.DELTA)
    task = await begin(reader)
    channel.say_tokens((0, 70), finished=[(handle, LENGTH) for handle in ended])
    await task
    await reader.aclose()
    assert channel.aborted == [handle for handle in range(3) if handle not in ended]
    assert len(channel.sent) == 2 and len(llm._outputs) == 0


async def test_an_abort_ends_all_choices(llm: AsyncLLM, channel: FakeChannel) -> None:
    reader = stream(llm, RequestOutputKind.CUMULATIVE)
    task = await begin(reader)
    channel.say_tokens((1, 80))
    await task
    await llm.abort("mine")
    last = await anext(reader)
    assert seen(last) == [(0, [], "abort"), (1, [80], "abort"), (2, [], "abort")] and last.finished
    assert channel.aborted == [0, 1, 2]


async def test_a_stop_text_ends_its_choice_alone(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    (token,) = set(tokenizer.encode("abab", False)[:1])
    reader = stream(llm, RequestOutputKind.CUMULATIVE, stop=tokenizer.decode([token]))
    task = await begin(reader)
    channel.say_tokens((1, token))
    assert [c.finish_reason for c in (await task).outputs] == [None, "stop", None]
    assert channel.aborted == [1]
    await reader.aclose()
    assert channel.aborted == [1, 0, 2]


async def test_what_the_engine_refuses_is_raised_once(llm: AsyncLLM, channel: FakeChannel) -> None:
    for kind in RequestOutputKind:
        reader = stream(llm, kind)
        task = await begin(reader)
        first = channel.added[-1].handle
        channel.say(
            Outputs(
                handles=b"",
                token_ids=b"",
                finished=[
                    Finished(handle=first + i, reason=FinishReason.ERROR, error="n: too many")
                    for i in range(3)
                ],
            )
        )
        with pytest.raises(RequestError, match="n: too many"):
            await task
    assert len(llm._outputs) == 0


async def test_a_call_that_is_cancelled_ends_all(llm: AsyncLLM, channel: FakeChannel) -> None:
    task = await begin(stream(llm, RequestOutputKind.FINAL_ONLY))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.aborted == [0, 1, 2]


async def test_queue_limits_count_choices(llm: AsyncLLM, channel: FakeChannel) -> None:
    object.__setattr__(llm._limits, "max_num_queued_reqs", 4)
    task = await begin(stream(llm, RequestOutputKind.DELTA))
    with pytest.raises(QueueFullError, match="3 requests wait"):
        await anext(llm.generate([5], SamplingParams(n=2)))
    task.cancel()
