"""Ranks of one replica on two hosts: what they compute, and what happens when a part of it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from sidestep import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    EngineStartError,
    SamplingParams,
    StructuredOutputsParams,
)
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.fault_plan import Fault, FaultPlan
from sidestep.ipc.processes.process import Child
from sidestep.ipc.processes.rank_hosts import RelayDoor, start_relay
from sidestep.ipc.transport import curve
from tests.integration.faults.plans import causes
from tests.integration.hosts.two_hosts import THERE, TwoHosts
from tests.processes import is_alive
from tests.waiting import until, until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 30.0
"""Seconds that a notice may take on a busy machine. Without it, calls would wait for minutes."""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    """Divide the ranks of each replica over two hosts."""
    both = TwoHosts(monkeypatch)
    yield both
    both.close()


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int, **params: Any) -> list[int]:
    tokens: list[int] = []
    async for out in llm.generate(
        prompt, SamplingParams(max_tokens=count, seed=5, ignore_eos=True, **params)
    ):
        tokens = list(out.outputs[0].token_ids)
    return tokens


def processes(hosts: TwoHosts) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the last relay, and the workers that it has started, in the order of their ranks."""
    relay = psutil.Process(hosts.relays[-1].pid)
    workers = [p for p in relay.children() if p.cmdline()[-1].startswith("worker ")]
    return relay, sorted(workers, key=lambda worker: worker.cmdline()[-1])


async def until_ended(pids: list[int]) -> None:
    async def ask() -> list[int]:
        await asyncio.sleep(0.01)
        return [pid for pid in pids if is_alive(pid)]

    await until(ask, lambda alive: not alive, LIMIT_S)


@pytest.mark.parametrize(
    ("options", "first_there"),
    [
        ({"pipeline_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
    ],
    ids=str,
)
async def test_tokens_are_those_of_one_host(
    make_llm: MakeLLM, hosts: TwoHosts, options: dict[str, int], first_there: int
) -> None:
    hosts.first_there = first_there
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    llm = make_llm(max_num_batched_tokens=48, num_kv_blocks=60, **options)
    vocab = llm.get_tokenizer().vocab_size
    prompts = [[i % 5 + 1] * (3 + 7 * i) for i in range(12)]
    got = await asyncio.gather(*(tokens_of(llm, prompt, 40) for prompt in prompts))
    assert got == [expected_tokens(prompt, 40, 5, vocab) for prompt in prompts]
    assert len(llm.pids) == 2 + first_there, "ids of the other host are not told"
    assert len(processes(hosts)[1]) == num_ranks - first_there


@pytest.mark.parametrize("is_relay", [False, True], ids=["rank", "relay"])
async def test_what_ends_on_the_other_host_is_named(
    make_llm: MakeLLM, hosts: TwoHosts, is_relay: bool
) -> None:
    llm = make_llm(pipeline_parallel_size=2, fake_step_ms=5.0, restart_limit=0)
    calls = [asyncio.create_task(tokens_of(llm, [1, 2, 3], 2000)) for _ in range(5)]
    await until_stats(llm, num_running=5)
    relay, workers = processes(hosts)
    ids = [*llm.pids.values(), relay.pid, *(each.pid for each in workers)]
    ids.remove(os.getpid())
    (relay if is_relay else workers[0]).kill()
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*calls, return_exceptions=True)
    cause = (
        r"host there with worker 1 \(stage 1\) has gone: the connection has ended"
        if is_relay
        else r"worker 1 \(stage 1\) \(pid \d+\) was killed by SIGKILL on host there"
    )
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert re.search(cause, str(result)), result
    await until_ended(ids)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="raise", at=5, rank=1),
        Fault(kind="drop", at=5, message="step", rank=1),
        Fault(kind="corrupt", at=5, message="step", rank=1),
        Fault(kind="corrupt", at=5, message="output", rank=1),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.message or fault.process}",
)
async def test_a_fault_of_the_other_host_is_named(
    make_llm: MakeLLM, hosts: TwoHosts, fault: Fault
) -> None:
    """Cover what the ranks of the other host report, and what their relay finds."""
    faults = msgspec.to_builtins(FaultPlan((fault,)))
    llm = make_llm(pipeline_parallel_size=2, restart_limit=0, fake_faults=faults)
    with pytest.raises(EngineDeadError) as caught:
        await tokens_of(llm, [1, 2, 3], 1500)
    assert any(re.search(cause, str(caught.value)) for cause in causes(fault)), str(caught.value)
    assert "worker 1 (stage 1) on host there" in str(caught.value)
    await until_ended([hosts.relays[-1].pid])


async def test_a_rank_of_the_core_s_own_host_is_named_with_it(
    make_llm: MakeLLM, hosts: TwoHosts
) -> None:
    llm = make_llm(pipeline_parallel_size=2, fake_step_ms=5.0, restart_limit=0)
    call = asyncio.create_task(tokens_of(llm, [1, 2, 3], 2000))
    await until_stats(llm, num_running=1)
    os.kill(llm.pids["worker_0"], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDeadError, match="worker 0 .* was killed by SIGKILL on host here"):
            await call
    await until_ended([hosts.relays[-1].pid])


async def test_nothing_is_left_of_a_core_that_is_killed(make_llm: MakeLLM, hosts: TwoHosts) -> None:
    llm = make_llm(tensor_parallel_size=2, fake_step_ms=5.0, restart_limit=0)
    call = asyncio.create_task(tokens_of(llm, [1, 2, 3], 2000))
    await until_stats(llm, num_running=1)
    relay, workers = processes(hosts)
    os.kill(llm.core_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="engine core .* was killed by SIGKILL"):
        await call
    await until_ended([relay.pid, *(each.pid for each in workers)])
    assert hosts.relays[-1].wait(LIMIT_S) and hosts.relays[-1].exit_status == 0


async def test_a_replica_with_a_dead_rank_elsewhere_is_started_again(
    make_llm: MakeLLM, hosts: TwoHosts
) -> None:
    llm = make_llm(pipeline_parallel_size=2, fake_step_ms=2.0)
    vocab = llm.get_tokenizer().vocab_size
    calls = [asyncio.create_task(tokens_of(llm, [9, i], 200)) for i in range(8)]
    await until_stats(llm, num_running=8)
    processes(hosts)[1][0].kill()
    assert await asyncio.gather(*calls) == [
        expected_tokens([9, i], 200, 5, vocab) for i in range(8)
    ]
    assert len(hosts.relays) == 2


async def test_calls_and_masks_reach_the_other_host(
    make_llm: MakeLLM, hosts: TwoHosts, tmp_path: Path
) -> None:
    llm = make_llm(pipeline_parallel_size=2, profiler_dir=str(tmp_path / "profiles"))
    vocab = llm.get_tokenizer().vocab_size
    await llm.start_profile()
    held = StructuredOutputsParams(choice=["return name", "return self"])
    params = SamplingParams(max_tokens=30, structured_outputs=held)
    texts = [out.outputs[0].text async for out in llm.generate([1, 2, 3], params)]
    assert texts[-1] in ("return name", "return self")
    files = await llm.stop_profile()
    assert len(set(files)) == 2
    for file in files:
        assert json.loads(Path(file).read_text())["traceEvents"]
    await llm.sleep(level=1)
    await llm.wake_up()
    assert await tokens_of(llm, [4, 5], 9) == expected_tokens([4, 5], 9, 5, vocab)


@pytest.mark.parametrize("victim", ["rank", "core"])
async def test_a_process_that_hangs_is_killed_and_its_requests_go_on(
    make_llm: MakeLLM, hosts: TwoHosts, victim: str
) -> None:
    llm = make_llm(pipeline_parallel_size=2, fake_step_ms=5.0, stall_limit=1.0)
    vocab = llm.get_tokenizer().vocab_size
    calls = [asyncio.create_task(tokens_of(llm, [9, i], 200)) for i in range(4)]
    await until_stats(llm, num_running=4)
    relay, (worker,) = processes(hosts)
    (worker if victim == "rank" else psutil.Process(llm.core_pid)).suspend()
    got = await asyncio.gather(*calls)
    assert got == [expected_tokens([9, i], 200, 5, vocab) for i in range(4)]
    assert llm.recovery.restarts == {"stall": 1}
    await until_ended([relay.pid, worker.pid])


async def test_a_host_that_is_silent_has_gone(make_llm: MakeLLM, hosts: TwoHosts) -> None:
    llm = make_llm(pipeline_parallel_size=2, fake_step_ms=5.0, restart_limit=0)
    call = asyncio.create_task(tokens_of(llm, [1, 2, 3], 2000))
    await until_stats(llm, num_running=1)
    relay, _ = processes(hosts)
    relay.suspend()
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineDeadError, match="host there .* or was silent for 3 s"):
                await call
    finally:
        relay.resume()
    await until_ended([relay.pid])


async def test_a_rank_that_computes_on_the_other_host_does_not_hang(hosts: TwoHosts) -> None:
    """Have the last stage compute for several times the limit for stalls."""
    slow = "tests.integration.recovery.test_slow_steps:Slow"
    args = EngineArgs(
        device="cpu", stall_limit=0.5, logits_processors=[slow], pipeline_parallel_size=2
    )
    async with AsyncLLM.from_engine_args(args) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={"Slow": 2.0})
        async for output in llm.generate([1, 2, 3], params):
            pass
        assert len(output.outputs[0].token_ids) == 3
        assert not llm.recovery.restarts


def test_a_relay_that_is_not_the_one_of_the_key_ends_the_start(
    make_llm: MakeLLM, hosts: TwoHosts
) -> None:
    _, door = start_relay_of(hosts)
    hosts.changes["relay"] = RelayDoor(door.port, curve.fresh_keys().public)
    with pytest.raises(EngineStartError, match="host there .* the relay has refused the connect"):
        make_llm(pipeline_parallel_size=2)
    assert hosts.relays[0].exit_status is None, "it serves whoever has the key"


def start_relay_of(hosts: TwoHosts) -> tuple[Child, RelayDoor]:
    relay, door = start_relay(THERE)
    hosts.relays.append(relay)
    hosts.doors.append(door)
    return relay, door


async def test_strangers_at_the_port_of_a_relay_change_nothing_and_are_counted(
    make_llm: MakeLLM, hosts: TwoHosts
) -> None:
    llm = make_llm(tensor_parallel_size=2, fake_step_ms=2.0, restart_limit=0)
    vocab = llm.get_tokenizer().vocab_size
    call = asyncio.create_task(tokens_of(llm, [7, 8], 500))
    await until_stats(llm, num_running=1)
    port = hosts.doors[-1].port
    stranger = socket.create_connection((THERE, port))
    with stranger, suppress(ConnectionError):
        stranger.sendall(os.urandom(100_000))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        peer = context.socket(zmq.PAIR)
        curve.connect(peer, curve.fresh_keys().public)
        peer.connect(f"tcp://{THERE}:{port}")
        await until_stats(llm, num_refused_peers=2)
    finally:
        context.destroy(linger=0)
    assert await call == expected_tokens([7, 8], 500, 5, vocab)
