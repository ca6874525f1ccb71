"""Several replicas behind one AsyncLLM, each played by the test.

The tests cover the choice of a replica and the death of one. test_stalled_replicas.py has the
tests of replicas without progress.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidestep import AsyncLLM, BeamSearchParams, EngineDeadError, EngineStartError, ValidationError
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.replicas import replica_set
from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.ipc.processes.core_args import Invitation
from sidestep.ipc.transport.messages import (
    AddRequest,
    Answer,
    Call,
    Connect,
    Dead,
    Finished,
    FinishReason,
    Outputs,
    Ready,
    pack_ids,
    unpack_ids,
)
from sidestep.ipc.transport.owner_line import GuestEnd, OwnerEnd
from tests.unit.frontend.fakes import FakeChannel, replicas_of
from tests.unit.frontend.replicas.played import holder, kill, last, router_of, started, turns


async def test_each_request_is_one_replica_s_and_its_abort_goes_there(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40, n=1 + i % 2)) for i in range(9)]
    await turns()
    assert [len(channel.added) for channel in channels] == [3, 3, 3]
    handles = [
        m.handle + i for channel in channels for m in channel.added for i in range(m.sampling.n)
    ]
    assert sorted(handles) == list(range(13)), "handles are unique over all replicas"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        assert sorted(channel.aborted) == sorted(
            m.handle + i for m in channel.added for i in range(m.sampling.n)
        )
    assert set(router_of(llm).loads.values()) == {0}


async def test_a_request_that_waits_moves_and_one_that_has_streamed_goes_on(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40, seed=i)) for i in range(3)]
    await turns()
    victim = holder(channels, 0)
    victim.say(started(0))
    victim.say_tokens((0, 70))
    victim.say_tokens((0, 71))
    kill(victim)
    await turns()
    (continued,) = [m for c in channels if c is not victim for m in c.added if m.handle == 0]
    assert unpack_ids(continued.output_token_ids).tolist() == [70, 71]
    assert (
        continued.prompt_token_ids == pack_ids([5] * 40)
        and continued.sampling == victim.added[0].sampling
    )
    # Messages of the dead replica have no effect.
    victim.say_tokens((0, 99), finished=[(0, FinishReason.LENGTH)])
    await turns()
    holder(channels, 0).say_tokens((0, 72), finished=[(0, FinishReason.LENGTH)])
    for handle in (1, 2):
        holder(channels, handle).say_tokens((handle, 73), finished=[(handle, FinishReason.LENGTH)])
    assert [output.outputs[0].token_ids for output in await asyncio.gather(*tasks)] == [
        [70, 71, 72],
        [73],
        [73],
    ]
    assert llm.is_running and not llm.errored
    assert [status.dead for status in llm.replicas].count(None) == 2
    assert set(router_of(llm).loads.values()) == {0}


async def test_what_had_ended_or_was_aborted_does_not_move(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    gone = asyncio.create_task(last(llm, [5] * 40))
    done = asyncio.create_task(last(llm, [6] * 40))
    await turns()
    gone.cancel()
    holder(channels, 1).say_tokens((1, 70), finished=[(1, FinishReason.LENGTH)])
    await done
    for channel in {holder(channels, handle) for handle in (0, 1)}:
        kill(channel)
        await turns()
    assert llm.is_running and sum(len(channel.added) for channel in channels) == 2


async def test_of_a_group_those_move_that_have_not_ended_each_with_its_own_seed(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(last(llm, [5] * 40, n=3, seed=4))
    await turns()
    victim = holder(channels, 0)
    whole = victim.added[0]
    victim.say_tokens((0, 70), (1, 71), (2, 72), finished=[(1, FinishReason.LENGTH)])
    kill(victim)
    await turns()
    moved = {m.handle: m for c in channels if c is not victim for m in c.added}
    assert {h: unpack_ids(m.output_token_ids).tolist() for h, m in moved.items()} == {
        0: [70],
        2: [72],
    }
    assert [moved[h].sampling for h in (0, 2)] == [whole.sampling.for_choice(h) for h in (0, 2)]
    for handle in (0, 2):
        holder(channels, handle).say_tokens((handle, 80), finished=[(handle, FinishReason.LENGTH)])
    assert [c.token_ids for c in (await task).outputs] == [[70, 80], [71], [72, 80]]


async def test_a_group_that_has_given_nothing_and_a_beam_search_move_as_they_are(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    tasks = [
        asyncio.create_task(last(llm, [5] * 40, n=3)),
        asyncio.create_task(
            llm.beam_search([6] * 40, BeamSearchParams(beam_width=4, max_tokens=5))
        ),
    ]
    await turns()
    sent = {m.handle: m for c in channels for m in c.added}
    for handle, task in zip((0, 3), tasks, strict=True):
        holder(channels, handle).say(started(handle))
        kill(holder(channels, handle))
        await turns()
        (again,) = [m for m in holder(channels, handle).added if m.handle == handle]
        assert (again.sampling, again.beam_search) == (
            sent[handle].sampling,
            sent[handle].beam_search,
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_ran_alone_at_a_death_in_probation_ends(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    """The request may be the cause, and must not kill the third replica too.

    A request that only waited there moves on.
    """
    tasks = [asyncio.create_task(last(llm, [5] * 40)) for _ in range(2)]
    await turns()
    for _ in range(2):
        at = holder(channels, 0)
        at.say(started(0))
        kill(at)
        await turns()
    with pytest.raises(EngineDeadError, match=r"replica \d: worker 0 was killed; the cause is"):
        await tasks[0]
    survivor = holder(channels, 1)
    survivor.say_tokens((1, 70), finished=[(1, FinishReason.LENGTH)])
    assert (await tasks[1]).outputs[0].token_ids == [70]


async def test_when_all_have_died_everybody_is_told_of_each(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task, watcher = asyncio.create_task(last(llm, [5] * 40)), asyncio.create_task(llm.wait_dead())
    await turns()
    assert not watcher.done()
    for number, channel in enumerate(channels):
        channel.say(Dead(cause=f"cause {number}"))
        await turns()
    everything = "replica 0: cause 0; replica 1: cause 1; replica 2: cause 2"
    with pytest.raises(EngineDeadError, match=everything):
        await task
    assert str(await watcher) == str(llm.dead_error) == everything and not llm.is_running
    with pytest.raises(EngineDeadError, match="replica 0: cause 0"):
        await llm.check_health()


async def test_the_flight_recorder_is_asked_of_one(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    asking = asyncio.create_task(llm.get_step_records(5, replica=2))
    await turns()
    (call,) = channels[2].sent
    assert isinstance(call, Call) and call.since == 5 and not channels[0].sent
    channels[2].say(Answer(call_id=call.call_id))
    assert await asking == []
    with pytest.raises(ValidationError, match="replica: must be from 0 to 2, not 3"):
        await llm.get_step_records(replica=3)
    kill(channels[1])
    await turns()
    with pytest.raises(EngineDeadError, match="replica 1: worker 0 was killed"):
        await llm.get_step_records(replica=1)


async def test_a_replica_that_dies_before_the_engine_is_used_is_not_used(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    kill(channels[0])
    llm._replicas.attach()
    await turns()
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40)) for i in range(4)]
    await turns()
    assert not channels[0].added and len(channels[1].added) + len(channels[2].added) == 4
    llm.shutdown()
    assert all(
        isinstance(r, EngineDeadError) for r in await asyncio.gather(*tasks, return_exceptions=True)
    )


def test_a_replica_that_cannot_start_names_itself(channels: list[FakeChannel]) -> None:
    config = EngineArgs(device="fake", data_parallel_size=3).create_engine_config()
    replicas = ReplicaSet(
        config, OutputProcessor(lambda handles: None), {n: (c, 0) for n, c in enumerate(channels)}
    )
    channels[1].say(Dead(cause="max_model_len: does not fit"))
    with pytest.raises(EngineStartError, match="^replica 1: max_model_len: does not fit$"):
        replicas.wait_ready()


def test_who_joins_does_without_a_replica_that_has_just_died(
    channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_set, "_OTHERS_S", 0.0)
    args = EngineArgs(device="fake", data_parallel_size=3, restart_limit=0)
    owner = OwnerEnd()
    replicas = ReplicaSet(
        args.create_engine_config(),
        OutputProcessor(lambda handles: None),
        {n: (channels[n], 4) for n in (0, 1)},
        line=GuestEnd(owner.path),
        dead={2: "worker 0 was killed"},
    )
    channels[1].say(
        Ready(
            max_model_len=9,
            num_kv_blocks=9,
            block_size=16,
            device="fake",
            core_pid=1,
            worker_pids=[],
        )
    )
    replicas.wait_ready()
    assert [status.dead for status in replicas.replicas] == [
        "has not answered when this frontend joined",
        None,
        "worker 0 was killed",
    ]
    replicas.close()
    owner.close()


async def test_who_is_invited_while_a_replica_dies_is_invited_by_the_others(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    inviting = asyncio.create_task(llm.invite())
    await turns()
    kill(channels[0])
    for number in (1, 2):
        (asked,) = [m for m in channels[number].sent if isinstance(m, Connect)]
        channels[number].say(Answer(call_id=asked.call_id, result={"client": 5 + number}))
    seats = Invitation.decode(await inviting).seats
    assert [(seat.replica, seat.client) for seat in seats] == [(1, 6), (2, 7)]
    llm.shutdown()


@pytest.mark.parametrize(
    ("options", "router"),
    [
        ({}, "PrefixRouter"),
        ({"routing": "round_robin"}, "RoundRobinRouter"),
        ({"enable_prefix_caching": False}, "LeastLoadedRouter"),
        ({"data_parallel_size": 1}, "RoundRobinRouter"),
    ],
    ids=str,
)
def test_the_router_is_what_the_options_say(
    options: dict[str, object], router: str, channels: list[FakeChannel]
) -> None:
    args: dict[str, Any] = {"device": "fake", "data_parallel_size": 3, **options}
    config = EngineArgs(**args).create_engine_config()
    made = replicas_of(
        dict(enumerate(channels[: config.parallel.data_parallel_size])),
        OutputProcessor(lambda handles: None),
        config,
    )
    assert type(made._requests.router).__name__ == router


async def test_the_end_of_one_of_a_group_is_not_the_group_s(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    task = asyncio.create_task(last(llm, [5] * 40, n=2))
    await turns()
    at = holder(channels, 0)
    at.say(
        Outputs(
            handles=b"", token_ids=b"", finished=[Finished(handle=0, reason=FinishReason.LENGTH)]
        )
    )
    await turns()
    loads = router_of(llm).loads
    assert sum(loads.values()) > 0 and len(llm._replicas._requests) == 1
    at.say(
        Outputs(
            handles=b"", token_ids=b"", finished=[Finished(handle=1, reason=FinishReason.LENGTH)]
        )
    )
    await task
    assert not llm._replicas._requests and isinstance(at.added[0], AddRequest)
