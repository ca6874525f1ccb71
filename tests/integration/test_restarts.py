"""Replicas that die are started again, and their requests go on: clients see a pause."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from sidestep import LLM, AsyncLLM, EngineDeadError, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.replicas import restart_budget
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.waiting import until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 60.0
"""Seconds that a notice may take on a busy machine. Without it, calls would wait for minutes."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_budget, "BACKOFF_S", (0.0, 0.1, 0.2))


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Check that the processes of the test end: those of dead cores, too."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(left, timeout=LIMIT_S)[1]


def params(seed: int, count: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=count, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )


async def tokens_of(llm: AsyncLLM, prompt: list[int], seed: int, count: int) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(prompt, params(seed, count)):
        tokens += output.outputs[0].token_ids
    return tokens


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", ["core", "worker_0", "worker_1"])
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
async def test_the_only_replica_comes_back_and_its_requests_go_on(
    make_llm: MakeLLM, victim: str, ranks: dict[str, Any]
) -> None:
    """Cover requests that stream, that wait in the core, and that come during the restart."""
    llm = make_llm(fake_step_ms=5.0, max_num_seqs=4, **ranks)
    vocab = llm.get_tokenizer().vocab_size
    prompts = [[i % 5 + 1] * 20 + [i] for i in range(12)]
    tasks = [asyncio.create_task(tokens_of(llm, p, i, 40)) for i, p in enumerate(prompts)]
    await until_stats(llm, num_running=4)
    before = llm.pids
    kill(before[victim])
    while not llm.replicas[0].restarting:
        await asyncio.sleep(0.01)
    late = asyncio.create_task(tokens_of(llm, [9, 9], 3, 10))
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*tasks) == [
            expected_tokens(prompt, 40, i, vocab) for i, prompt in enumerate(prompts)
        ]
        assert await late == expected_tokens([9, 9], 10, 3, vocab)
    assert not set(before.values()) & set(llm.pids.values()) - {os.getpid()}
    assert llm.replicas[0].dead is None and llm.replicas[0].restarting is None
    await llm.check_health()
    await until_idle(llm)


async def test_after_the_last_start_the_engine_is_dead_and_says_why(make_llm: MakeLLM) -> None:
    llm = make_llm(restart_limit=2, fake_step_ms=1.0)
    vocab = llm.get_tokenizer().vocab_size
    for i in range(2):
        kill(llm.core_pid)
        async with asyncio.timeout(LIMIT_S):
            assert await tokens_of(llm, [5, i], i, 5) == expected_tokens([5, i], 5, i, vocab)
    stream = llm.generate([1], params(1, 2000))
    await anext(stream)
    kill(llm.core_pid)
    with pytest.raises(EngineDeadError, match="SIGKILL; it has been started again 2 times in 10 m"):
        async for _ in stream:
            pass
    assert llm.errored and "SIGKILL" in str(await llm.wait_dead())


def test_a_batch_goes_on_after_a_death(fake_model: str) -> None:
    with LLM(model=fake_model, device="fake", fake_step_ms=2.0) as llm:
        vocab = llm.get_tokenizer().vocab_size
        kill(llm.pids["core"])
        outputs = llm.generate([[3, i] for i in range(5)], params(4, 30), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [
            expected_tokens([3, i], 30, 4, vocab) for i in range(5)
        ]


async def test_all_frontends_go_on_and_later_ones_join(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=3.0, max_num_seqs=4)
    vocab = llm.get_tokenizer().vocab_size
    guests = [AsyncLLM.join(await llm.invite()) for _ in range(2)]
    guests.append(AsyncLLM.join(await guests[1].invite()))
    try:
        for turn in range(2):
            frontends = [llm, *guests]
            tasks = [
                asyncio.create_task(tokens_of(each, [turn + 1, i], i, 60))
                for i, each in enumerate(frontends * 2)
            ]
            await until_stats(llm, num_running=4)
            kill(llm.core_pid)
            while not llm.replicas[0].restarting:
                await asyncio.sleep(0.01)
            guests.append(AsyncLLM.join(await llm.invite()))
            late = len(tasks)
            tasks.append(asyncio.create_task(tokens_of(guests[-1], [turn + 1, late], late, 60)))
            async with asyncio.timeout(LIMIT_S):
                assert await asyncio.gather(*tasks) == [
                    expected_tokens([turn + 1, i], 60, i, vocab) for i in range(len(tasks))
                ]
            guests.pop(0).shutdown()
        for each in (llm, *guests):
            await each.check_health()
        await until_idle(llm)
        stream = guests[0].generate([1], params(1, 2000))
        await anext(stream)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            async with asyncio.timeout(LIMIT_S):
                async for _ in stream:
                    pass
    finally:
        for guest in guests:
            guest.shutdown()


async def test_guests_end_when_the_engine_is_given_up(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=3.0, restart_limit=1, data_parallel_size=2)
    guest = AsyncLLM.join(await llm.invite())
    try:
        streams = [asyncio.create_task(tokens_of(guest, [i], i, 2000)) for i in range(2)]
        await until_stats(llm, num_running=2)
        killed = set[int]()
        async with asyncio.timeout(LIMIT_S):
            while not llm.errored:
                # A death in probation costs no budget, so it does not bring the end nearer.
                if not guest.recovery.suspects:
                    serving = [s.ready for s in llm.replicas if not (s.dead or s.restarting)]
                    for pid in {ready.core_pid for ready in serving if ready} - killed:
                        kill(pid)
                        killed.add(pid)
                await asyncio.sleep(0.01)
        async with asyncio.timeout(LIMIT_S):
            errors = await asyncio.gather(*streams, return_exceptions=True)
            await guest.wait_dead()
        assert all("SIGKILL" in str(error) for error in errors)
        assert guest.health == llm.health == "dead"
    finally:
        guest.shutdown()


async def test_a_request_that_waits_can_be_aborted_and_has_its_deadline(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_budget, "BACKOFF_S", (600.0,))
    llm = make_llm(fake_step_ms=3.0)
    vocab = llm.get_tokenizer().vocab_size
    told: dict[str, list[int]] = {name: [] for name in ("stays", "aborted", "late", "left")}
    reasons: dict[str, str | None] = {}

    async def run(name: str, **options: Any) -> None:
        async for output in llm.generate([7, 8], params(3, 2000), name, **options):
            told[name] += output.outputs[0].token_ids
            reasons[name] = output.outputs[0].finish_reason

    tasks = {name: asyncio.create_task(run(name)) for name in ("stays", "aborted", "left")}
    await until_stats(llm, num_running=3)
    kill(llm.core_pid)
    while not llm.replicas[0].restarting:
        await asyncio.sleep(0.01)
    assert await llm.check_health() == "restarting"
    tasks["late"] = asyncio.create_task(run("late", deadline_s=0.3))
    tasks["left"].cancel()
    await llm.abort("aborted")
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([tasks["aborted"], tasks["late"], tasks["left"]])
    assert reasons["aborted"] == reasons["late"] == "abort" and not tasks["stays"].done()
    for name in ("stays", "aborted", "left"):
        assert told[name] == expected_tokens([7, 8], len(told[name]), 3, vocab)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await tasks["stays"]
