"""Replicas that are started again, each core played by the test: no token is lost or repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sidestep import AsyncLLM, EngineDeadError, SamplingParams
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.restart_budget import RestartBudget
from sidestep.ipc.common.errors import EngineStalledError
from sidestep.ipc.params.sampling_params import RequestOutputKind
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Dead,
    FinishReason,
    WorkersChanged,
    unpack_ids,
)
from tests.unit.frontend.fakes import FakeChannel, llm_of, ready
from tests.unit.frontend.replicas.played import kill, router_of, started, turns

LENGTH = 12
Cores = list[FakeChannel]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the arguments of the starts of cores; the test plays each core that is started."""
    starts: list[Any] = []

    def start_core(client: EngineClient, *args: Any) -> None:
        starts.append(args)

    monkeypatch.setattr(EngineClient, "start_core", start_core)
    yield starts


def make(tokenizer: Tokenizer, count: int, limit: int = 3) -> tuple[AsyncLLM, Cores]:
    """Return an engine and the cores of its replicas, to which those of later starts are added."""
    cores = [FakeChannel() for _ in range(count)]

    def open_channel() -> FakeChannel:
        cores.append(FakeChannel())
        return cores[-1]

    llm = llm_of(
        cores[0], tokenizer, 100, *cores[1:], restart_limit=limit, open_channel=open_channel
    )
    return llm, cores


async def told(llm: AsyncLLM, seed: int, tokens: list[int]) -> None:
    """Collect the tokens of a request."""
    params = SamplingParams(
        max_tokens=LENGTH, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async for output in llm.generate([5, 6, 7], params, str(seed)):
        tokens += output.outputs[0].token_ids


def health(llm: AsyncLLM) -> str:
    """Return the health of an engine now."""
    return llm.health


def right(handle: int) -> list[int]:
    """Return the tokens that a played core gives a request."""
    return [(7 * handle + 3 * i) % 90 for i in range(LENGTH)]


def in_core(core: FakeChannel) -> dict[int, int]:
    """Let a core read its messages; return the number of tokens of each of its requests."""
    done: dict[int, int] = core.__dict__.setdefault("done", {})
    for message in core.sent[core.__dict__.get("num_read", 0) :]:
        if isinstance(message, AddRequest):
            done[message.handle] = len(unpack_ids(message.output_token_ids))
            core.say(started(message.handle))
        elif isinstance(message, AbortRequests):
            for handle in message.handles:
                done.pop(handle, None)
    core.__dict__["num_read"] = len(core.sent)
    return done


def play(core: FakeChannel, rng: random.Random) -> None:
    """Let a core compute a token of some of its requests: what follows the tokens that it got."""
    done = in_core(core)
    live = [handle for handle, count in done.items() if count < LENGTH]
    for handle in rng.sample(live, rng.randint(0, len(live))):
        at = done[handle]
        done[handle] += 1
        end = [(handle, FinishReason.LENGTH)] if at + 1 == LENGTH else []
        core.say_tokens((handle, right(handle)[at]), finished=end)


@pytest.mark.parametrize("seed", range(30))
async def test_every_request_is_complete_and_exact_whatever_dies(
    seed: int, tokenizer: Tokenizer, begun: list[Any]
) -> None:
    """Run random requests, steps, deaths, failed starts, returns and readers that leave.

    A death ends a request only if nothing else runs then: it may be the cause.
    """
    rng = random.Random(seed)
    num = rng.choice([1, 1, 2, 3])
    llm, cores = make(tokenizer, num, limit=1000)
    llm._replicas.attach()
    serving, starting = dict(enumerate(cores)), dict[int, FakeChannel]()
    tasks: dict[int, asyncio.Task[None]] = {}
    tokens: dict[int, list[int]] = {}
    left, alone = set[int](), set[int]()

    for step in range(300):
        what = rng.random()
        if what < 0.2 and len(tasks) < 40:
            tokens[step] = []
            tasks[step] = asyncio.create_task(told(llm, step, tokens[step]))
        elif what < 0.25 and tasks:
            gone = rng.choice(list(tasks))
            left.add(gone)
            tasks[gone].cancel()
        elif what < 0.31 and serving:
            replica = rng.choice(list(serving))
            ran = [h for h, count in in_core(serving[replica]).items() if count < LENGTH]
            alone.update(ran if len(ran) == 1 else [])
            kill(serving.pop(replica))
            await turns()
            starting[replica] = cores[-1]
        elif what < 0.34 and starting:
            replica = rng.choice(list(starting))
            kill(starting.pop(replica))
            await turns()
            starting[replica] = cores[-1]
        elif what < 0.45 and starting:
            replica = rng.choice(list(starting))
            serving[replica] = starting.pop(replica)
            serving[replica].say(ready(100 + step))
        else:
            for core in serving.values():
                play(core, rng)
        if rng.random() < 0.7:
            await turns()
        assert set(router_of(llm).loads) <= set(serving)
    for replica, core in starting.items():
        serving[replica] = core
        core.say(ready(1000 + replica))
    while not all(task.done() for task in tasks.values()):
        await turns()
        for core in serving.values():
            play(core, rng)
    handles = {message.request_id: message.handle for core in cores for message in core.added}
    for number, task in tasks.items():
        if str(number) in handles:
            expected = right(handles[str(number)])
            assert tokens[number] == expected[: len(tokens[number])]
        if number in left:
            continue
        if (error := task.exception()) is not None:
            assert handles[str(number)] in alone and "the cause is this request" in str(error)
        else:
            assert tokens[number] == expected
    await turns()
    assert not len(llm._replicas._requests) and set(router_of(llm).loads.values()) == {0}
    assert health(llm) == "healthy"
    llm.shutdown()


async def test_a_start_that_would_be_useless_is_the_last(
    tokenizer: Tokenizer, begun: list[Any]
) -> None:
    llm, cores = make(tokenizer, 1)
    request = asyncio.create_task(told(llm, 1, []))
    await turns()
    kill(cores[0])
    await turns()
    assert health(llm) == await llm.check_health() == "restarting" and llm.is_running
    with pytest.raises(EngineStalledError, match="started again: worker 0 was killed"):
        await llm.get_stats()
    waiting = [
        asyncio.create_task(call) for call in (llm.reset_prefix_cache(), llm.invite(), llm.sleep())
    ]
    await turns()
    cores[1].say(Dead(cause="GPU 0 needs a reset", is_final=True))
    await turns()
    for task in (request, *waiting):
        with pytest.raises(EngineDeadError, match="GPU 0 needs a reset"):
            await task
    assert len(begun) == 1 and health(llm) == "dead"


async def test_calls_that_wait_for_a_restart_end_with_the_engine(
    tokenizer: Tokenizer, begun: list[Any]
) -> None:
    llm, cores = make(tokenizer, 1)
    llm._replicas.attach()
    kill(cores[0])
    await turns()
    calls = [asyncio.create_task(call) for call in (llm.reset_prefix_cache(), llm.invite())]
    await turns()
    llm.shutdown()
    for call in calls:
        with pytest.raises(EngineDeadError, match="shut down"):
            await call


async def test_what_slept_stays_dead_and_new_weights_are_loaded_again(
    tokenizer: Tokenizer, begun: list[Any]
) -> None:
    llm, cores = make(tokenizer, 2)
    llm._replicas.attach()
    cores[0].say(WorkersChanged(weights="/new"))
    await turns()
    kill(cores[1])
    await turns()
    _, config, replica, again = begun[0]
    assert (config.spec.path, replica, again.number, again.delay_s) == ("/new", 1, 1, 0.0)
    assert again.pids == (1,), "the processes whose memory must be free"
    cores[0].say(WorkersChanged(weights="/newer"))
    await turns()
    cores[2].say(ready(9))  # it has read weights that are not in use any more
    await turns()
    assert begun[1][1].spec.path == "/newer" and begun[1][3].pids == (9,)
    cores[3].say(ready(10))
    await turns()
    assert health(llm) == "healthy"
    cores[0].say(WorkersChanged(weights="/newer", sleep_level=1))
    await turns()
    kill(cores[0])
    await turns()
    assert len(begun) == 2 and health(llm) == "degraded"
    assert "it slept" in (llm.replicas[0].dead or "")


def test_the_budget_is_for_each_replica_and_for_ten_minutes() -> None:
    now = [0.0]
    budget = RestartBudget(3, lambda: now[0])
    assert [budget.take(0) for _ in range(4)] == [0.0, 5.0, 30.0, None]
    assert "3 times in 10 minutes" in budget.spent(0)
    assert budget.take(1) == 0.0 and budget.spent(1) == ""
    now[0] = 599.0
    assert budget.take(0) is None
    now[0] = 601.0
    assert budget.take(0) == 0.0 and budget.total(0) == 4
    none = RestartBudget(0, lambda: 0.0)
    assert none.take(0) is None and none.spent(0) == ""


async def test_a_suspect_that_waits_for_its_turn_can_end_and_the_others_have_theirs(
    tokenizer: Tokenizer, begun: list[Any]
) -> None:
    """Let one suspect end by its deadline, and one by its reader; the third one goes on."""
    llm, cores = make(tokenizer, 1)
    params = SamplingParams(max_tokens=LENGTH)
    late = asyncio.create_task(anext(llm.generate([1], params, "late", deadline_s=0.2)))
    left, stays = (asyncio.create_task(told(llm, seed, [])) for seed in (1, 2))
    await turns()
    cores[0].say(started(0, 1, 2))
    kill(cores[0])
    await turns()
    assert llm._replicas.counts.suspects == 3
    left.cancel()
    assert (await late).outputs[0].finish_reason == "abort"
    assert llm._replicas.counts.suspects == 1
    fresh = asyncio.create_task(told(llm, 3, []))
    cores[1].say(ready(9))
    await turns()
    assert [message.handle for message in cores[1].added] == [2], "new requests wait"
    cores[1].say_tokens((2, 7), (2, 8))
    await turns()
    assert [message.handle for message in cores[1].added] == [2, 3]
    assert not cores[1].aborted and llm._replicas.counts.suspects == 0
    for handle in (2, 3):
        cores[1].say_tokens((handle, 9), finished=[(handle, FinishReason.LENGTH)])
    await asyncio.gather(stays, fresh)
