"""Replicas without progress: the health of an engine, and requests beside a stalled replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sidestep import AsyncLLM, EngineStalledError
from sidestep.frontend.replicas import core_questions, stall_watch
from sidestep.ipc.transport.messages import Call, FinishReason
from tests.unit.frontend.fakes import FakeChannel
from tests.unit.frontend.replicas.played import answer_calls, holder, kill, last, turns


async def test_questions_go_to_all_that_live(llm: AsyncLLM, channels: list[FakeChannel]) -> None:
    asking = asyncio.create_task(llm.get_stats())
    await turns()
    answer_calls(channels, num_running=[1, 2, 3], kv_cache_usage=[0.1, 0.2, 0.6])
    assert await asking == {"num_running": 6, "kv_cache_usage": pytest.approx(0.3)}
    resetting = asyncio.create_task(llm.reset_prefix_cache())
    await turns()
    kill(channels[1])  # a replica that dies while it is asked is left out
    await turns()
    answer_calls([channels[0], channels[2]], done=[1.0, 1.0])
    assert await resetting
    by_replica = asyncio.create_task(llm.get_stats_by_replica())
    await turns()
    answer_calls([channels[0], channels[2]], num_running=[4, 5])
    assert await by_replica == {0: {"num_running": 4}, 2: {"num_running": 5}}


async def test_an_engine_is_healthy_while_one_replica_makes_progress(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    asking = asyncio.create_task(llm.check_health(max_stall_s=30))
    await turns()
    answer_calls(channels, seconds_since_progress=[40, 0, 31])
    await asking


async def test_the_replicas_that_keep_an_engine_from_being_healthy_are_named(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    asking = asyncio.create_task(llm.check_health(max_stall_s=30, timeout_s=0.05))
    await turns()
    answer_calls(channels[:2], seconds_since_progress=[40, 31])
    with pytest.raises(EngineStalledError) as caught:
        await asking
    assert str(caught.value) == (
        "replica 0: the steps in flight have made no progress for 40.0 s; "
        "replica 1: the steps in flight have made no progress for 31.0 s; "
        "replica 2: the engine core has not answered for 0.05 s"
    )


async def test_nobody_waits_for_a_core_that_is_silent(
    llm: AsyncLLM, channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_questions, "_SPARE_S", 0.01)
    asking = asyncio.create_task(llm.get_stats_by_replica())
    await turns()
    answer_calls(channels[:2], num_running=[1, 2])
    assert await asking == {0: {"num_running": 1}, 1: {"num_running": 2}}


@pytest.fixture
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watch run its turns in quick succession.

    Many turns of the loop are between them.
    """
    monkeypatch.setattr(stall_watch, "TURN_S", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def stalled(llm: AsyncLLM) -> dict[int, str]:
    return {status.number: status.stalled for status in llm.replicas if status.stalled is not None}


@pytest.mark.parametrize("whole_core", [True, False])
async def test_a_replica_without_progress_gets_nothing_until_it_goes_on(
    llm: AsyncLLM, channels: list[FakeChannel], quick_turns: None, whole_core: bool
) -> None:
    """Stop a core, or its worker.

    A stopped core does not answer. A core whose worker is stopped answers that it makes no
    progress.
    """
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40)) for i in range(3)]
    await turns()
    stuck = holder(channels, 0)
    number, others = (
        channels.index(stuck),
        [channel for channel in channels if channel is not stuck],
    )
    progress = asyncio.create_task(keep_going(others, [] if whole_core else [stuck]))
    await until(lambda: set(stalled(llm)) == {number})
    assert stalled(llm)[number] == (
        "the engine core does not answer" if whole_core else "the steps in flight make no progress"
    )
    before = len(stuck.added)
    tasks += [asyncio.create_task(last(llm, [50 + i] * 40)) for i in range(6)]
    await turns()
    assert len(stuck.added) == before
    progress.cancel()
    progress = asyncio.create_task(keep_going(channels, []))
    await until(lambda: not stalled(llm))
    tasks += [asyncio.create_task(last(llm, [90 + i] * 40)) for i in range(9)]
    await until(lambda: len(stuck.added) > before)
    progress.cancel()
    llm.shutdown()
    await asyncio.gather(*tasks, progress, return_exceptions=True)


async def test_a_replica_whose_steps_are_slow_is_given_more_time(
    llm: AsyncLLM, channels: list[FakeChannel], quick_turns: None
) -> None:
    task = asyncio.create_task(last(llm, [5] * 40))
    await turns()
    slow, number = holder(channels, 0), channels.index(holder(channels, 0))

    async def steps_take(seconds: float, condition: Callable[[], bool]) -> None:
        while not condition():
            answer_calls([slow], seconds_since_progress=[seconds])
            await asyncio.sleep(0)

    await steps_take(3.0, lambda: number in stalled(llm))
    await steps_take(0.1, lambda: not stalled(llm))
    pings = 0

    def has_answered_some() -> bool:
        nonlocal pings
        pings += any(isinstance(message, Call) for message in slow.sent)
        return pings > 20

    await steps_take(3.0, has_answered_some)
    assert not stalled(llm)
    await steps_take(5.0, lambda: number in stalled(llm))
    llm.shutdown()
    await asyncio.gather(task, return_exceptions=True)


async def keep_going(well: list[FakeChannel], without_progress: list[FakeChannel]) -> None:
    while True:
        answer_calls(well, seconds_since_progress=[0.0] * 3)
        answer_calls(without_progress, seconds_since_progress=[9.0])
        await asyncio.sleep(0)


async def test_while_all_replicas_stall_requests_wait_for_any(
    llm: AsyncLLM, channels: list[FakeChannel], quick_turns: None
) -> None:
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40)) for i in range(9)]
    await until(lambda: len(stalled(llm)) == 3)
    tasks.append(asyncio.create_task(last(llm, [99] * 40)))
    await turns()
    assert sum(len(channel.added) for channel in channels) == 10
    llm.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_engine_without_requests_is_asked_nothing(
    llm: AsyncLLM, channels: list[FakeChannel], quick_turns: None
) -> None:
    task = asyncio.create_task(last(llm, [5] * 40))
    await turns()
    at = holder(channels, 0)
    at.say_tokens((0, 70), finished=[(0, FinishReason.LENGTH)])
    await task
    await until(lambda: llm._replicas._watch._timer is None)
    for channel in channels:
        channel.sent.clear()
    await asyncio.sleep(5 * stall_watch.TURN_S)
    assert not any(channel.sent for channel in channels)


async def test_a_replica_that_stalls_and_dies_in_probation_is_chosen_when_it_serves_again(
    llm: AsyncLLM,
) -> None:
    requests = llm._replicas._requests
    requests.claim(0, ends_turn=False)
    requests.router.suspend(0)
    requests.lose(0)
    requests.serves(0, 90)
    assert set(requests.router.candidates) == {1, 2}
    requests.claim(None, ends_turn=False)
    assert set(requests.router.candidates) == {0, 1, 2}


async def test_a_core_that_is_asked_whether_it_is_idle_is_watched(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    """A probation waits for the answer, and nothing else runs there."""
    await turns()
    llm._replicas.attach()
    answer = llm._replicas.ask_idle(1)
    assert [m.method for m in channels[1].sent if isinstance(m, Call)] == ["ping"]
    assert (await answer).result == {"idle": 1.0}
