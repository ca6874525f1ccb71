"""Faults on other hosts: each is found, named, and costs the requests time only."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from sidestep.frontend.replicas.crash_file import read_crash
from sidestep.ipc.hosts.node_messages import NodeInvitation
from sidestep.ipc.transport import curve
from tests.integration.hosts.conftest import MakeLLM, StartNode
from tests.integration.hosts.streams import check_streams, placed
from tests.waiting import LIMIT_S, until, until_stats


async def test_a_host_that_stops_is_given_up_and_ends_when_it_goes_on(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    start_node(2)
    stopped = start_node(3)
    llm = make_joined(fake_step_ms=2.0)
    processes = psutil.Process(stopped.pid).children(recursive=True)
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    os.kill(stopped.pid, signal.SIGSTOP)

    async def hosts() -> list[str]:
        return list(placed(llm))

    await until(hosts, lambda names: names == ["h2"])
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(LIMIT_S) == 1
    assert psutil.wait_procs(processes, LIMIT_S)[1] == []
    await streams


@pytest.mark.parametrize(
    ("victim", "number", "origin"),
    [
        ("worker", signal.SIGKILL, "worker"),
        ("core", signal.SIGKILL, "core"),
        ("worker", signal.SIGSTOP, "stall"),
        ("core", signal.SIGSTOP, "stall"),
    ],
)
async def test_a_process_that_dies_or_hangs_elsewhere_leaves_a_crash_file(
    start_node: StartNode,
    make_joined: MakeLLM,
    tmp_path: Path,
    victim: str,
    number: signal.Signals,
    origin: str,
) -> None:
    start_node(2)
    folder = tmp_path / "crashes"
    llm = make_joined(
        data_parallel_size=1, fake_step_ms=2.0, stall_limit=1.0, crash_dir=str(folder)
    )
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    pids = llm.pids
    os.kill(pids["core" if victim == "core" else "worker_0"], number)
    await streams
    assert llm.recovery.restarts == {origin: 1}
    (path,) = folder.glob("*.json")
    crash = read_crash(str(path))
    assert crash.origin == origin
    if victim == "core" and number == signal.SIGKILL:
        assert "was killed by SIGKILL on host h2" in crash.cause
        assert len(crash.requests) == 16 and (crash.steps or crash.flights)


def test_a_node_whose_invitation_is_of_another_head_ends(
    start_node: StartNode, make_joined: MakeLLM, invitation: Path
) -> None:
    start_node(2)
    llm = make_joined(data_parallel_size=1)
    told = NodeInvitation.decode(invitation.read_text())
    stale = NodeInvitation(head=told.head, server_key=curve.fresh_keys().public)
    invitation.write_text(stale.encode())
    assert start_node(3).wait(LIMIT_S) == 1
    assert list(placed(llm)) == ["h2"]


async def test_a_node_that_is_told_to_end_ends_its_cores(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    leaving = start_node(2)
    start_node(3)
    llm = make_joined(fake_step_ms=2.0)
    processes = psutil.Process(leaving.pid).children(recursive=True)
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    leaving.terminate()
    await streams
    assert leaving.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert psutil.wait_procs(processes, LIMIT_S)[1] == []
