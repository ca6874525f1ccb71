"""Calls to the workers, as a frontend makes them: answers, refusals, cancelled tasks and deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidestep import AsyncLLM, EngineDeadError, WorkerCallError
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import Answer, CallWorkers, CancelCall, Dead
from sidestep.ipc.transport.worker_calls import StartProfile, WorkerCall
from tests.unit.frontend.fakes import FakeChannel, llm_of


def calls_of(channel: FakeChannel) -> list[CallWorkers]:
    return [message for message in channel.sent if isinstance(message, CallWorkers)]


async def until_called(channel: FakeChannel, call: WorkerCall) -> CallWorkers:
    """Return the message with this call, when it has been sent."""
    while not (found := [message for message in calls_of(channel) if message.call == call]):
        await asyncio.sleep(0)
    return found[-1]


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
    await asyncio.sleep(0.01)
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
