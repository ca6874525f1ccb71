"""AsyncLLM with a core that the test plays.

The tests cover streams, slow readers, cancellation at each await, and death.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest

from sidestep import (
    AsyncLLM,
    EngineDeadError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from sidestep import ValidationError as Invalid
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    Dead,
    Finished,
    FinishReason,
    Outputs,
    Started,
)
from tests.unit.frontend.fakes import FakeChannel

KINDS = RequestOutputKind


async def added(channel: FakeChannel, count: int = 1) -> None:
    """Wait until the core has been sent this many requests."""
    while len(channel.added) < count:
        await asyncio.sleep(0)


async def collect(
    llm: AsyncLLM, kind: RequestOutputKind = KINDS.DELTA, **params: Any
) -> list[RequestOutput]:
    sampling = SamplingParams(max_tokens=50, output_kind=kind, **params)
    return [out async for out in llm.generate([5, 6], sampling)]


async def test_each_step_gives_an_output_to_a_reader_that_keeps_up(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    reader = asyncio.create_task(collect(llm))
    await added(channel)
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            started=[Started(handle=0, num_cached_tokens=1, scheduled=9.0)],
        )
    )
    for token in (70, 71):
        channel.say_tokens((0, token))
        for _ in range(5):
            await asyncio.sleep(0)
    channel.say_tokens((0, 72), finished=[(0, FinishReason.LENGTH)])
    outputs = await reader
    assert [o.outputs[0].token_ids for o in outputs] == [[70], [71], [72]]
    assert [o.finished for o in outputs] == [False, False, True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].num_cached_tokens == 1 and outputs[-1].metrics.scheduled_ts == 9.0
    assert outputs[-1].metrics.num_generation_tokens == 3
    assert channel.aborted == [] and len(llm._outputs) == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (KINDS.DELTA, [[70], [71, 72, 73]]),
        (KINDS.CUMULATIVE, [[70], [70, 71, 72, 73]]),
        (KINDS.FINAL_ONLY, [[70, 71, 72, 73]]),
    ],
)
async def test_what_a_slow_reader_missed_is_merged_into_one_output(
    llm: AsyncLLM,
    channel: FakeChannel,
    tokenizer: Tokenizer,
    kind: KINDS,
    expected: list[list[int]],
) -> None:
    stream = llm.generate([5, 6], SamplingParams(max_tokens=50, output_kind=kind))
    first = asyncio.create_task(anext(stream))
    await added(channel)
    channel.say_tokens((0, 70))
    if kind != KINDS.FINAL_ONLY:
        got = [await first]
    else:
        for _ in range(9):
            await asyncio.sleep(0)
        assert not first.done(), "nobody is woken before the end"
        got = []
    for token in (71, 72):
        channel.say_tokens((0, token))
    channel.say_tokens((0, 73), finished=[(0, FinishReason.LENGTH)])
    for _ in range(9):
        await asyncio.sleep(0)
    if kind == KINDS.FINAL_ONLY:
        got.append(await first)
    got += [out async for out in stream]
    assert [o.outputs[0].token_ids for o in got] == expected
    text = tokenizer.decode([5, 6, 70, 71, 72, 73])[len(tokenizer.decode([5, 6])) :]
    shown = (
        "".join(o.outputs[0].text for o in got) if kind == KINDS.DELTA else got[-1].outputs[0].text
    )
    assert shown == text


async def test_a_stop_string_ends_the_stream_here_and_the_request_at_the_core(
    llm: AsyncLLM, channel: FakeChannel, tokenizer: Tokenizer
) -> None:
    reader = asyncio.create_task(collect(llm, KINDS.FINAL_ONLY, stop="name("))
    await added(channel)
    for token in [*tokenizer.encode("get_name(x"), 99]:
        channel.say_tokens((0, token))
    (out,) = await reader
    assert (out.outputs[0].text, out.outputs[0].finish_reason, out.outputs[0].stop_reason) == (
        "get_",
        "stop",
        "name(",
    )
    assert channel.aborted == [0]


async def test_cancelled_while_the_prompt_is_tokenised_nothing_is_sent(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    async def run() -> None:
        async for _ in llm.generate("x" * 3000):
            pass

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.sent == [] and len(llm._outputs) == 0


async def test_cancelled_while_waiting_for_output_the_request_is_aborted(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    task = asyncio.create_task(collect(llm))
    await added(channel)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert channel.aborted == [0] and len(llm._outputs) == 0


async def test_left_between_outputs_the_request_is_aborted(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    async with aclosing(llm.generate([5], SamplingParams(max_tokens=9))) as stream:
        waiting = asyncio.create_task(anext(stream))
        await added(channel)
        channel.say_tokens((0, 70))
        await waiting
    assert channel.aborted == [0] and len(llm._outputs) == 0


async def test_cancelled_while_asking_the_core_nothing_is_left(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    task = asyncio.create_task(llm.get_stats())
    while not channel.sent:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm._replicas._clients[0]._calls == {}
    (call,) = channel.sent
    assert isinstance(call, Call)
    channel.say(Answer(call_id=call.call_id, result={}))  # a late answer has no effect
    channel.say(Outputs(handles=b"", token_ids=b""))
    for _ in range(5):
        await asyncio.sleep(0)


async def test_late_tokens_of_an_ended_request_are_dropped(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    reader = asyncio.create_task(collect(llm))
    await added(channel)
    await llm.abort(channel.added[0].request_id)
    channel.say_tokens((0, 70), finished=[(0, FinishReason.LENGTH)])
    outputs = await reader
    assert (
        outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].outputs[0].token_ids == []
    )
    assert channel.aborted == [0]


async def test_bad_input_leaves_other_requests_untouched(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    good = asyncio.create_task(collect(llm))
    await added(channel)
    with pytest.raises(Invalid, match="prompt"):
        async for _ in llm.generate(""):
            pass
    with pytest.raises(Invalid, match="request_id"):
        async for _ in llm.generate([5], request_id=channel.added[0].request_id):
            pass
    channel.say_tokens((0, 70), finished=[(0, FinishReason.STOP)])
    assert [o.outputs[0].token_ids for o in await good] == [[70]]
    assert len(channel.sent) == 1


async def test_a_refusal_by_the_engine_is_raised_in_its_words(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    reader = asyncio.create_task(collect(llm))
    await added(channel)
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            finished=[Finished(handle=0, reason=FinishReason.ERROR, error="prompt: too long")],
        )
    )
    with pytest.raises(RequestError, match="prompt: too long"):
        await reader


async def test_death_wakes_everybody_with_the_cause(llm: AsyncLLM, channel: FakeChannel) -> None:
    waiting = [asyncio.create_task(collect(llm, kind)) for kind in (KINDS.DELTA, KINDS.FINAL_ONLY)]
    asking = asyncio.create_task(llm.get_stats())
    await added(channel, 2)
    channel.say(Dead(cause="worker 0 was killed by SIGKILL"))
    for task in (*waiting, asking):
        with pytest.raises(EngineDeadError, match="worker 0 was killed by SIGKILL"):
            await task
    with pytest.raises(EngineDeadError):
        await collect(llm)
    assert llm.errored


async def test_requests_of_one_turn_of_the_loop_arrive_together(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    """A core at rest would begin a step with the first one alone."""
    tasks = [asyncio.create_task(collect(llm)) for _ in range(20)]
    await added(channel, 20)
    assert channel.sent_together == [16, 4]
    more = asyncio.create_task(collect(llm))
    asking = asyncio.create_task(llm.get_stats())
    await added(channel, 21)
    assert [type(message) for message in channel.sent[20:]] == [AddRequest, Call]
    for task in (*tasks, more, asking):
        task.cancel()
    await asyncio.gather(*tasks, more, asking, return_exceptions=True)


async def test_a_request_that_ends_at_once_is_added_first(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    states = await llm.start([5, 6])
    llm.leave(*states)
    assert [type(message) for message in channel.sent] == [AddRequest, AbortRequests]
    await asyncio.sleep(0)
    assert channel.sent_together == [2]


async def test_a_request_is_queued_before_the_core_can_have_it(
    llm: AsyncLLM, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a fast core schedule some choices while the frontend still prepares others."""
    scheduled = list[float]()

    def send(*messages: Any) -> None:
        channel.sent += messages
        scheduled.append(time.monotonic())

    monkeypatch.setattr(channel, "send", send)
    states = await llm.start([5, 6], SamplingParams(n=4))
    await asyncio.sleep(0)
    assert len(scheduled) == 1
    for state in states:
        assert state.metrics.queued_ts is not None
        assert state.metrics.arrival_time <= state.metrics.queued_ts <= scheduled[0]
    llm.leave(*states)
