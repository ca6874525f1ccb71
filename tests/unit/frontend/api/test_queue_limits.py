"""Limits of the queue: waiting requests are counted, and bounded where an option says so.

A watcher learns of the engine's death.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from sidestep import AsyncLLM, QueueFullError, RequestOutput, SamplingParams, ValidationError
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.frontend_config import FrontendConfig
from sidestep.ipc.transport.messages import Dead, FinishReason, Outputs, Started
from tests.unit.frontend.fakes import FakeChannel, llm_of

Stream = AsyncGenerator[RequestOutput, None]


def limit(llm: AsyncLLM, **limits: Any) -> None:
    made: Any = llm
    made._limits = FrontendConfig(**limits)


async def send(llm: AsyncLLM, prompt: list[int]) -> tuple[Stream, asyncio.Task[RequestOutput]]:
    """Send a request; return it, and the task that waits for its first output."""
    stream = llm.generate(prompt, SamplingParams(max_tokens=8))
    task = asyncio.create_task(anext(stream))
    for _ in range(2):  # requests of the first turn are sent in the second
        await asyncio.sleep(0)
    return stream, task


async def leave(stream: Stream, task: asyncio.Task[RequestOutput]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await stream.aclose()


async def test_requests_wait_until_the_engine_has_scheduled_them(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    first, second = await send(llm, [1, 2, 3]), await send(llm, [4, 5])
    assert (llm.num_waiting, llm.num_waiting_tokens) == (2, 5)
    handle = channel.added[0].handle
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            started=[Started(handle=handle, num_cached_tokens=0, scheduled=0.0)],
        )
    )
    channel.say_tokens((handle, 7))
    await first[1]
    assert (llm.num_waiting, llm.num_waiting_tokens) == (1, 2)
    await leave(*second)
    assert (llm.num_waiting, llm.num_waiting_tokens) == (0, 0)
    channel.say_tokens((handle, 7), finished=[(handle, FinishReason.LENGTH)])
    async for _ in first[0]:
        pass
    assert (llm.num_waiting, llm.num_waiting_tokens) == (0, 0)


async def test_a_full_queue_refuses_before_anything_is_sent(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    limit(llm, max_num_queued_reqs=1)
    first = await send(llm, [1, 2, 3])
    with pytest.raises(QueueFullError, match="max_num_queued_reqs"):
        await anext(llm.generate([4]))
    assert len(channel.added) == 1 and llm.num_waiting == 1
    await leave(*first)
    await leave(*await send(llm, [4]))
    assert len(channel.added) == 2


async def test_a_queue_of_tokens_refuses_what_would_be_too_much(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    limit(llm, max_num_queued_tokens=5)
    first = await send(llm, [1] * 9)  # alone it may wait: it could never run otherwise
    with pytest.raises(QueueFullError, match="max_num_queued_tokens"):
        await anext(llm.generate([4]))
    await leave(*first)
    small = [await send(llm, [1, 2, 3]), await send(llm, [4, 5])]
    with pytest.raises(QueueFullError):
        await anext(llm.generate([4]))
    for each in small:
        await leave(*each)


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"^{name}: "):
        options: dict[str, Any] = {name: 0}
        EngineArgs(**options)


async def test_who_watches_is_told_of_the_engine_s_death(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    watchers = [asyncio.create_task(llm.wait_dead()) for _ in range(3)]
    await asyncio.sleep(0)
    watchers[0].cancel()
    channel.say(Dead(cause="it fell over"))
    for watcher in watchers[1:]:
        assert "it fell over" in str(await watcher)
    assert "it fell over" in str(await llm.wait_dead())
    with pytest.raises(asyncio.CancelledError):
        await watchers[0]


async def test_texts_are_tokenised_as_for_a_request(
    channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    llm = llm_of(channel, tokenizer, 20_000)
    for text in ("def f(", "word " * 2000):
        assert await llm.tokenize(text) == llm.get_tokenizer().encode(text)
    assert await llm.tokenize("<|im_start|>", add_special_tokens=False) == [1]
