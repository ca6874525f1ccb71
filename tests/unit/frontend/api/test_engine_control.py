"""Calls to the workers, as a frontend makes them: answers, refusals, cancelled tasks and deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidestep import AsyncLLM, EngineDeadError, WorkerCallError
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import Answer, CallWorkers, CancelCall, Dead
from sidestep.ipc.transport.worker_calls import (
    ApplyWeights,
    DropWeights,
    PrepareWeights,
    Sleep,
    StartProfile,
    WakeUp,
    WorkerCall,
)
from tests.unit.frontend.fakes import FakeChannel, llm_of


def calls_of(channel: FakeChannel) -> list[CallWorkers]:
    return [message for message in channel.sent if isinstance(message, CallWorkers)]


async def until_called(channel: FakeChannel, call: WorkerCall) -> CallWorkers:
    """Return the message with this call, when it has been sent."""
    while not (found := [message for message in calls_of(channel) if message.call == call]):
        await asyncio.sleep(0)
    return found[-1]


async def some_turns() -> None:
    """Let the event loop handle what has come."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def channels() -> list[FakeChannel]:
    return [FakeChannel(), FakeChannel()]


@pytest.fixture
def llm(channels: list[FakeChannel], tokenizer: Tokenizer) -> AsyncLLM:
    return llm_of(channels[0], tokenizer, 100, channels[1])


PROFILE = StartProfile(folder="/f")


async def test_all_replicas_are_called_and_all_must_answer(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(llm.start_profile("/f"))
    first, second = [await until_called(channel, PROFILE) for channel in channels]
    channels[0].say(Answer(call_id=first.call_id, results=[{}]))
    await some_turns()
    assert not task.done()
    channels[1].say(Answer(call_id=second.call_id, results=[{}]))
    await task


async def test_a_refusal_names_its_replica(llm: AsyncLLM, channels: list[FakeChannel]) -> None:
    task = asyncio.create_task(llm.start_profile("/f"))
    for channel, error in zip(channels, (None, "no room"), strict=True):
        message = await until_called(channel, PROFILE)
        channel.say(Answer(call_id=message.call_id, error=error))
    with pytest.raises(WorkerCallError, match="^replica 1: no room$"):
        await task


async def test_a_cancelled_task_takes_its_calls_back(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(llm.start_profile("/f"))
    messages = [await until_called(channel, PROFILE) for channel in channels]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for channel, message in zip(channels, messages, strict=True):
        assert channel.sent[-1] == CancelCall(client=0, call_id=message.call_id)
        channel.say(Answer(call_id=message.call_id, error="too late to matter"))


async def test_a_replica_that_dies_meanwhile_is_left_out(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(llm.start_profile("/f"))
    message = await until_called(channels[0], PROFILE)
    channels[1].say(Dead(cause="gone"))
    channels[0].say(Answer(call_id=message.call_id, results=[{}]))
    await task
    task = asyncio.create_task(llm.start_profile("/f"))
    while len(calls_of(channels[0])) < 2:
        await asyncio.sleep(0)
    channels[0].say(Dead(cause="gone too"))
    with pytest.raises(EngineDeadError, match="gone too"):
        await task


async def test_a_folder_is_named_by_its_absolute_path(
    llm: AsyncLLM, channels: list[FakeChannel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = asyncio.create_task(llm.start_profile("here"))
    await until_called(channels[0], StartProfile(folder=str(tmp_path / "here")))
    task.cancel()


async def answer(channel: FakeChannel, call: WorkerCall, error: str | None = None) -> None:
    """Answer a call as the core, when it has come."""
    message = await until_called(channel, call)
    channel.say(Answer(call_id=message.call_id, error=error, results=[] if error else [{}]))


async def test_a_sleep_that_one_replica_refuses_ends_on_the_others(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(llm.sleep(2, timeout_s=7.0))
    assert (await until_called(channels[0], Sleep(level=2))).wait_s == 7.0
    await answer(channels[0], Sleep(level=2))
    await answer(channels[1], Sleep(level=2), "requests still ran")
    for channel in channels:
        assert not task.done()
        await answer(channel, WakeUp())
    with pytest.raises(WorkerCallError, match="replica 1: requests still ran"):
        await task


async def test_new_weights_are_used_when_all_replicas_have_read_them(
    llm: AsyncLLM, channels: list[FakeChannel], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    task = asyncio.create_task(llm.update_weights(folder))
    await answer(channels[0], PrepareWeights(folder=folder))
    await until_called(channels[1], PrepareWeights(folder=folder))
    await some_turns()
    assert len(calls_of(channels[0])) == 1
    await answer(channels[1], PrepareWeights(folder=folder))
    for channel in channels:
        await answer(channel, ApplyWeights(folder=folder))
    await task
    assert all(len(calls_of(channel)) == 2 for channel in channels)


async def test_weights_that_one_replica_cannot_read_are_dropped_by_all(
    llm: AsyncLLM, channels: list[FakeChannel], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    task = asyncio.create_task(llm.update_weights(folder))
    await answer(channels[0], PrepareWeights(folder=folder))
    await answer(channels[1], PrepareWeights(folder=folder), "a weight is missing")
    with pytest.raises(WorkerCallError, match="replica 1: a weight is missing"):
        await task
    for channel in channels:
        assert [type(message.call) for message in calls_of(channel)] == [
            PrepareWeights,
            DropWeights,
        ]


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_cancelled_update_takes_its_call_back_and_drops_what_was_read(
    is_read: bool, llm: AsyncLLM, channels: list[FakeChannel], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    task = asyncio.create_task(llm.update_weights(folder))
    last: WorkerCall = PrepareWeights(folder=folder)
    if is_read:
        for channel in channels:
            await answer(channel, last)
        last = ApplyWeights(folder=folder)
    messages = [await until_called(channel, last) for channel in channels]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for channel, message in zip(channels, messages, strict=True):
        *_, cancel, drop = channel.sent
        assert cancel == CancelCall(client=0, call_id=message.call_id)
        assert isinstance(drop, CallWorkers) and drop.call == DropWeights()
