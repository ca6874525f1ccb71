"""Processes that hang are killed, and the requests of their replica go on: clients see a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest

from sidestep import AsyncLLM, EngineDeadError, EngineStalledError, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.replicas import restart_budget
from sidestep.ipc.params.sampling_params import RequestOutputKind
from sidestep.ipc.transport.messages import Answer
from tests.waiting import until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 60.0
STALL_S = 1.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_budget, "BACKOFF_S", (0.0, 0.1, 0.2))


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Check that the processes of the test end: those that were stopped, too."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(left, timeout=LIMIT_S)[1]


async def tokens_of(llm: AsyncLLM, prompt: list[int], seed: int, count: int) -> list[int]:
    tokens: list[int] = []
    params = SamplingParams(
        max_tokens=count, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
    return tokens


async def unhealthy(llm: AsyncLLM) -> str:
    """Return why the engine is not healthy, as soon as it is not."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await llm.check_health(timeout_s=STALL_S / 4)
            except EngineStalledError as error:
                return str(error)
            assert not llm.replicas[0].restarting, "it was healthy until it was killed"
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("victim", ["core", "worker_0", "worker_1"])
@pytest.mark.parametrize("ranks", [{}, {"pipeline_parallel_size": 2}], ids=["one", "pipeline"])
async def test_a_replica_whose_process_is_stopped_is_replaced_and_its_requests_go_on(
    make_llm: MakeLLM, victim: str, ranks: dict[str, Any]
) -> None:
    if victim == "worker_1" and not ranks:
        pytest.skip("there is one rank")
    llm = make_llm(fake_step_ms=5.0, max_num_seqs=4, stall_limit=STALL_S, **ranks)
    vocab = llm.get_tokenizer().vocab_size
    prompts = [[i % 5 + 1] * 20 + [i] for i in range(8)]
    tasks = [asyncio.create_task(tokens_of(llm, p, i, 100)) for i, p in enumerate(prompts)]
    await until_stats(llm, num_running=4)
    before = llm.pids
    os.kill(before[victim], signal.SIGSTOP)
    assert await unhealthy(llm)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*tasks) == [
            expected_tokens(prompt, 100, i, vocab) for i, prompt in enumerate(prompts)
        ]
    assert not set(before.values()) & set(llm.pids.values()) - {os.getpid()}
    assert await llm.check_health() == "healthy"
    assert llm.recovery.restarts == {"stall": 1}
    await until_idle(llm)


async def test_a_core_that_hangs_without_requests_is_found_by_a_question(make_llm: MakeLLM) -> None:
    llm = make_llm(stall_limit=STALL_S)
    os.kill(llm.core_pid, signal.SIGSTOP)
    with pytest.raises(EngineStalledError, match="has not answered"):
        await llm.check_health(timeout_s=0.2)
    vocab = llm.get_tokenizer().vocab_size
    async with asyncio.timeout(LIMIT_S):
        while not llm.recovery.restarts:
            await asyncio.sleep(0.01)
        assert await tokens_of(llm, [5, 6], 3, 9) == expected_tokens([5, 6], 9, 3, vocab)


@pytest.mark.parametrize(
    "ask",
    [AsyncLLM.invite, AsyncLLM.reset_prefix_cache, AsyncLLM.get_memory_use],
    ids=lambda f: f.__name__,
)
async def test_a_question_without_a_limit_ends_with_the_core_that_hangs(
    make_llm: MakeLLM, ask: Callable[[AsyncLLM], Awaitable[object]]
) -> None:
    llm = make_llm(stall_limit=STALL_S, restart_limit=0)
    os.kill(llm.core_pid, signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDeadError, match="the engine core has not answered"):
            await ask(llm)


async def test_a_call_that_takes_longer_than_the_limit_ends_no_core(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core answers while it waits for a worker, here for at least the turns of two limits."""
    llm = make_llm(stall_limit=STALL_S)
    await tokens_of(llm, [5], 0, 1)
    before, client = llm.pids, llm._replicas._clients[0]
    ping, turns = client.ping, iter(range(16))

    def count() -> asyncio.Future[Answer]:
        if next(turns, None) is None:
            os.kill(before["worker_0"], signal.SIGCONT)
        return ping()

    monkeypatch.setattr(client, "ping", count)
    os.kill(before["worker_0"], signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        assert await llm.get_memory_use()
    assert llm.pids == before and not llm.recovery.restarts


async def test_a_core_that_hangs_before_it_serves_a_guest_is_replaced(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has no requests: it waits for the guest's seat alone."""
    llm = make_llm(fake_step_ms=5.0, stall_limit=STALL_S)
    vocab, guests = llm.get_tokenizer().vocab_size, llm._replicas._guests
    guest, give_seats = AsyncLLM.join(await llm.invite()), guests.back

    def hang(replica: int) -> None:
        monkeypatch.setattr(guests, "back", give_seats)
        os.kill(llm.core_pid, signal.SIGSTOP)
        give_seats(replica)

    try:
        await tokens_of(guest, [7], 0, 1)
        monkeypatch.setattr(guests, "back", hang)
        os.kill(llm.core_pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while not guest.replicas[0].restarting:
                await asyncio.sleep(0.001)
            assert await tokens_of(guest, [5, 6], 3, 9) == expected_tokens([5, 6], 9, 3, vocab)
        assert llm.recovery.restarts == {"core": 1, "stall": 1}
    finally:
        guest.shutdown()


async def test_the_owner_ends_a_core_that_answers_none_of_its_guests(make_llm: MakeLLM) -> None:
    """The owner has no requests itself, as in a server with several processes."""
    llm = make_llm(fake_step_ms=5.0, stall_limit=STALL_S)
    vocab = llm.get_tokenizer().vocab_size
    guest = AsyncLLM.join(await llm.invite())
    try:
        task = asyncio.create_task(tokens_of(guest, [5, 6], 3, 200))
        await until_stats(llm, num_running=1)
        os.kill(llm.core_pid, signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            assert await task == expected_tokens([5, 6], 200, 3, vocab)
        assert llm.recovery.restarts == {"stall": 1}
    finally:
        guest.shutdown()


async def test_without_a_limit_nothing_is_killed_and_a_stopped_process_can_go_on(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(fake_step_ms=5.0, stall_limit=0.0)
    vocab = llm.get_tokenizer().vocab_size
    task = asyncio.create_task(tokens_of(llm, [5, 6], 3, 100))
    await until_stats(llm, num_running=1)
    before = llm.pids
    os.kill(before["worker_0"], signal.SIGSTOP)
    while llm.replicas[0].stalled is None:
        await asyncio.sleep(0.01)
    with pytest.raises(EngineStalledError):
        await llm.check_health()
    os.kill(before["worker_0"], signal.SIGCONT)
    async with asyncio.timeout(LIMIT_S):
        assert await task == expected_tokens([5, 6], 100, 3, vocab)
    assert llm.pids == before


async def test_a_frontend_that_stands_still_ends_no_core(make_llm: MakeLLM) -> None:
    """The core goes on meanwhile, and its messages are read when the loop runs again."""
    llm = make_llm(fake_step_ms=5.0, stall_limit=0.4)
    vocab = llm.get_tokenizer().vocab_size
    task = asyncio.create_task(tokens_of(llm, [5, 6], 3, 300))
    await until_stats(llm, num_running=1)
    for _ in range(3):
        threading.Event().wait(0.6)  # the event loop of this test stands still
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        assert await task == expected_tokens([5, 6], 300, 3, vocab)
    assert not llm.recovery.restarts
