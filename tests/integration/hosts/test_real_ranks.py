"""The bundled model on a CPU, with ranks on two hosts: real messages between the ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from sidestep import DEFAULT_MODEL, LLM, AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from tests.e2e.test_parity import engine_tokens
from tests.e2e.test_pipeline import everything
from tests.integration.hosts.two_hosts import THERE, TwoHosts
from tests.waiting import until_stats

PROMPTS = [[i % 50 + 1, *range(3, 4 + 9 * i)] for i in range(8)]
COUNTS = [5 + 6 * i for i in range(8)]
DIVIDED: list[dict[str, Any]] = [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    """Divide the ranks of each replica over two hosts."""
    both = TwoHosts(monkeypatch)
    yield both
    both.close()


@pytest.mark.parametrize("options", DIVIDED, ids=str)
def test_greedy_tokens_equal_those_of_one_process(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = engine_tokens(DEFAULT_MODEL, PROMPTS, COUNTS)
    both = TwoHosts(monkeypatch)
    try:
        assert engine_tokens(DEFAULT_MODEL, PROMPTS, COUNTS, **options) == alone
    finally:
        both.close()
    assert both.relays[0].exit_status == 0


def test_requests_of_all_kinds_are_answered_as_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 26, "pipeline_parallel_size": 2}
    on_one_host = everything(**options)
    both = TwoHosts(monkeypatch)
    try:
        assert everything(**options) == on_one_host
    finally:
        both.close()


@pytest.mark.parametrize("options", DIVIDED, ids=str)
def test_bytes_of_strangers_at_each_open_port_change_nothing(
    hosts: TwoHosts, options: dict[str, Any]
) -> None:
    """Cover the ports of torch's messages too, which have no keys."""
    with LLM(
        DEFAULT_MODEL, device="cpu", dtype="float32", cpu_threads=1, restart_limit=0, **options
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        expected = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs[0].token_ids
        ports = open_ports(psutil.Process().children(recursive=True))
        assert (THERE, hosts.doors[0].port) in ports
        assert len(ports) >= 3, "the relay, the store and the ranks listen"
        for port in ports:
            stranger = socket.create_connection(port)
            with stranger, suppress(ConnectionError):
                stranger.sendall(os.urandom(100_000))
        again = llm.generate([PROMPTS[3]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert again == expected


def open_ports(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("victim", [0, 1])
async def test_the_rank_that_is_killed_is_named_and_not_the_one_that_waits_for_it(
    hosts: TwoHosts, victim: int
) -> None:
    args = EngineArgs(
        device="cpu", cpu_threads=1, restart_limit=0, pipeline_parallel_size=2, max_model_len=2048
    )
    async with AsyncLLM.from_engine_args(args) as llm:

        async def consume() -> None:
            params = SamplingParams(max_tokens=2000, ignore_eos=True)
            async for _ in llm.generate([1, 2, 3], params):
                pass

        call = asyncio.create_task(consume())
        await until_stats(llm, num_steps=10)
        worker = next(
            each
            for each in psutil.Process().children(recursive=True)
            if each.cmdline()[-1] == f"worker {victim} (stage {victim})"
        )
        os.kill(worker.pid, signal.SIGKILL)
        where = ("here", "there")[victim]
        with pytest.raises(
            EngineDeadError, match=rf"worker {victim} .* was killed by SIGKILL on host {where}"
        ):
            async with asyncio.timeout(30):
                await call
