"""Ends of requests and of the engine: dropped, refused, shut down, stalled.

Nothing is left of them.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from sidestep import (
    AsyncLLM,
    EngineDeadError,
    EngineStalledError,
    EngineStartError,
    SamplingParams,
    ValidationError,
)
from sidestep.frontend.api import async_llm
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.common.errors import SidestepError
from sidestep.ipc.transport.messages import AddRequest, Answer, Call, Dead, FinishReason, Ready
from tests.unit.frontend.api.test_async_llm import added, collect
from tests.unit.frontend.fakes import FakeChannel, client_of


async def until(condition: Callable[[], bool]) -> None:
    """Run turns of the loop until the condition holds, or the test's time limit ends it."""
    while not condition():
        await asyncio.sleep(0)


async def answer(channel: FakeChannel, **result: float) -> None:
    """Answer the next question to the core."""
    await until(lambda: any(isinstance(m, Call) for m in channel.sent))
    (call,) = (m for m in channel.sent if isinstance(m, Call))
    channel.say(Answer(call_id=call.call_id, result=result))


async def test_a_generator_that_is_dropped_aborts_its_request(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    stream = llm.generate([5], SamplingParams(max_tokens=9))
    waiting = asyncio.create_task(anext(stream))
    await added(channel)
    channel.say_tokens((0, 70))
    await waiting
    del stream, waiting
    gc.collect()
    await until(lambda: channel.aborted == [0])
    assert len(llm._outputs) == 0


async def test_a_generator_that_never_ran_sends_nothing(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    stream = llm.generate([5])
    await stream.aclose()
    assert channel.sent == []


async def test_an_ended_request_is_not_aborted_when_its_generator_is_left(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    stream = llm.generate([5])
    waiting = asyncio.create_task(anext(stream))
    await added(channel)
    channel.say_tokens((0, 70), finished=[(0, FinishReason.LENGTH)])
    assert (await waiting).finished
    await stream.aclose()
    assert channel.aborted == []


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(
    llm: AsyncLLM, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("no more descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_send", refuse)
        with pytest.raises(OSError, match="no more descriptors"):
            await anext(llm.generate([5], request_id="mine"))
    assert len(llm._outputs) == 0
    again = asyncio.create_task(anext(llm.generate([5], request_id="mine")))
    await added(channel)
    channel.say_tokens((1, 70), finished=[(1, FinishReason.LENGTH)])
    assert (await again).request_id == "mine"


@pytest.mark.parametrize("request_id", [5, "\ud83d"])
async def test_a_request_id_is_text(llm: AsyncLLM, channel: FakeChannel, request_id: str) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        await anext(llm.generate([5], request_id=request_id))
    assert channel.sent == []


async def test_of_two_calls_with_one_id_at_the_same_time_the_later_is_refused(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    text = "x = 1\n" * 500  # tokenised in a thread: both have been called before either is sent
    llm._inputs.limit = PromptLimit(10_000)
    calls = [asyncio.create_task(anext(llm.generate(text, request_id="mine"))) for _ in range(2)]
    await added(channel)
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ValidationError, match="'mine' is in use"):
        await done.pop()
    channel.say_tokens((0, 70), finished=[(0, FinishReason.LENGTH)])
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(r, ValidationError) for r in results) == 1 and len(channel.added) == 1


async def test_several_requests_are_aborted_at_once_and_unknown_ids_are_ignored(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    readers = [asyncio.create_task(collect(llm)) for _ in range(3)]
    await added(channel, 3)
    ids = [m.request_id for m in channel.added]
    await llm.abort([*ids[:2], "unknown"])
    assert channel.aborted == [0, 1]
    assert [(await r)[-1].outputs[0].finish_reason for r in readers[:2]] == ["abort", "abort"]
    channel.say_tokens((2, 70), finished=[(2, FinishReason.LENGTH)])
    assert (await readers[2])[-1].outputs[0].finish_reason == "length"


async def until_deadline(llm: AsyncLLM, deadline_s: float) -> RequestOutput:
    async for output in llm.generate([5, 6], SamplingParams(max_tokens=50), deadline_s=deadline_s):
        pass
    return output


async def test_a_deadline_is_kept_while_the_core_hangs(llm: AsyncLLM, channel: FakeChannel) -> None:
    reader = asyncio.create_task(until_deadline(llm, 0.01))
    others = asyncio.create_task(until_deadline(llm, 60))
    await added(channel, 2)
    (output,) = (await reader).outputs
    assert (output.finish_reason, output.stop_reason) == ("abort", "deadline")
    assert channel.aborted == [0] and not others.done()
    others.cancel()


async def test_the_core_s_word_on_a_deadline_comes_first(
    llm: AsyncLLM, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delay the loop past the deadline.

    It reads the core's earlier outputs before it ends the request.
    """
    monkeypatch.setattr(async_llm, "_GRACE_S", 0.0)
    reader = asyncio.create_task(until_deadline(llm, 0.02))
    await added(channel)
    time.sleep(0.05)
    channel.say_tokens((0, 70), finished=[(0, FinishReason.LENGTH)])
    (output,) = (await reader).outputs
    assert (output.finish_reason, output.token_ids) == ("length", [70])


async def test_shutting_down_wakes_everybody_and_may_be_repeated(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    waiting: list[asyncio.Task[object]] = [
        asyncio.create_task(collect(llm)),
        asyncio.create_task(llm.get_stats()),
    ]
    await added(channel)
    await until(lambda: len(channel.sent) == 2)
    assert llm.is_running
    llm.shutdown()
    llm.shutdown()
    for task in waiting:
        with pytest.raises(EngineDeadError, match="has been shut down"):
            await task
    with pytest.raises(EngineDeadError, match="has been shut down"):
        await llm.check_health()
    assert not llm.is_running and not llm.errored


async def test_as_a_context_manager_it_shuts_down_at_the_end(llm: AsyncLLM) -> None:
    async with llm as same:
        assert same is llm and same.is_running
    assert not llm.is_running and "shut down" in repr(llm)


async def test_every_caller_after_death_gets_an_exception_of_its_own(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    llm._replicas.attach()
    channel.say(Dead(cause="engine core was killed by SIGKILL"))
    await until(lambda: llm.errored)
    caught = []
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="SIGKILL") as info:
            await llm.check_health()
        caught.append(info.value)
    assert caught[0] is not caught[1] and not llm.is_running


async def test_an_engine_that_makes_progress_is_healthy(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    asking = asyncio.create_task(llm.check_health())
    await answer(channel, seconds_since_progress=0.5)
    await asking


async def test_steps_without_progress_are_a_stall(llm: AsyncLLM, channel: FakeChannel) -> None:
    asking = asyncio.create_task(llm.check_health(max_stall_s=30))
    await answer(channel, seconds_since_progress=31)
    with pytest.raises(EngineStalledError, match="no progress for 31.0 s"):
        await asking


async def test_a_core_that_does_not_answer_is_a_stall(llm: AsyncLLM) -> None:
    with pytest.raises(EngineStalledError, match="has not answered for 0 s"):
        await llm.check_health(timeout_s=0)


async def test_the_prefix_cache_is_reset_and_an_unknown_call_is_an_error(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    asking = asyncio.create_task(llm.reset_prefix_cache())
    await answer(channel, done=1.0)
    assert await asking
    channel.sent.clear()
    wrong = asyncio.create_task(llm._replicas.ask_all("nonsense"))
    await until(lambda: bool(channel.sent))
    call = channel.sent[0]
    assert isinstance(call, Call)
    channel.say(Answer(call_id=call.call_id, error="method: unknown call 'nonsense'"))
    with pytest.raises(SidestepError, match="unknown call"):
        await wrong


def test_starting_waits_for_the_core_s_word(channel: FakeChannel) -> None:
    ready = Ready(
        max_model_len=9, num_kv_blocks=9, block_size=16, device="fake", core_pid=1, worker_pids=[2]
    )
    channel.say(ready)
    assert client_of(channel).poll_ready(0) == ready
    channel.say(Dead(cause="model: has no weights"))
    with pytest.raises(EngineStartError, match="^model: has no weights$"):
        client_of(channel).poll_ready(0)


def test_it_moves_to_a_new_event_loop_when_the_old_one_has_ended(channel: FakeChannel) -> None:
    client = client_of(channel)

    async def ask() -> dict[str, float] | None:
        channel.sent.clear()
        asking = asyncio.create_task(client.ask("stats"))
        await answer(channel, number=4.0)
        return (await asking).result

    assert asyncio.run(ask()) == asyncio.run(ask()) == {"number": 4.0}


async def test_it_refuses_a_second_event_loop_while_the_first_is_open(channel: FakeChannel) -> None:
    client = client_of(channel)
    client.attach()

    def elsewhere() -> None:
        async def attach() -> None:
            client.attach()

        asyncio.run(attach())

    with pytest.raises(SidestepError, match="in another event loop"):
        await asyncio.to_thread(elsewhere)
    client.close()


async def test_news_of_a_death_after_the_loop_has_closed_harms_nobody(channel: FakeChannel) -> None:
    client = client_of(channel)
    closed = asyncio.new_event_loop()
    closed.close()
    client._tell_loop(closed, "engine core was killed")


async def test_a_request_may_be_aborted_while_it_is_tokenised(
    llm: AsyncLLM, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, ready = llm._inputs.process, asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> Any:
        await ready.wait()
        return await process(*args, **options)

    monkeypatch.setattr(llm._inputs, "process", slowly)

    async def all_outputs() -> list[RequestOutput]:
        return [output async for output in llm.generate([5], request_id="long")]

    outputs = asyncio.create_task(all_outputs())
    await until(lambda: "long" in llm._preparing)
    with pytest.raises(ValidationError, match="request_id: 'long' is in use"):
        await anext(llm.generate([5], request_id="long"))
    await llm.abort("long")
    ready.set()
    (output,) = await outputs
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not any(isinstance(m, AddRequest) for m in channel.sent) and len(llm._outputs) == 0
