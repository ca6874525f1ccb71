"""Replicas on several hosts: tokens come from all, and the end of a host costs time only."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq

from sidestep import AsyncLLM, EngineStartError
from sidestep.frontend.placement.join import JoinPlacer
from sidestep.ipc.processes import addresses
from sidestep.ipc.transport import curve
from tests.integration.hosts.conftest import StartNode
from tests.integration.hosts.streams import check_streams, placed
from tests.processes import PYTHON_PATH
from tests.waiting import LIMIT_S, until, until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]


async def used(llm: AsyncLLM) -> set[int]:
    """Return the replicas that have computed tokens."""
    stats = await llm.get_stats_by_replica()
    return {replica for replica, each in stats.items() if each["prefix_cache_queries"]}


async def test_a_host_that_is_killed_amid_streams_loses_none_and_is_used_again(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    start_node(2)
    victim = start_node(3)
    llm = make_joined(fake_step_ms=2.0)
    before = placed(llm)
    assert set(before) == {"h2", "h3"} and sorted(before.values()) == [(0,), (1,)]
    await check_streams(llm)
    assert await used(llm) == {0, 1}
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    (lost,) = before["h3"]
    processes = psutil.Process(victim.pid).children(recursive=True)
    assert len(processes) >= 2
    victim.kill()
    await streams
    assert psutil.wait_procs(processes, LIMIT_S)[1] == []
    restarting = llm.replicas[lost].restarting
    assert restarting is not None and "host h3 has gone" in restarting
    assert llm.health == "restarting" and llm.recovery.restarts["host"] == 1
    assert list(placed(llm)) == ["h2"]
    start_node(3)

    async def health() -> str:
        return llm.health

    await until(health, lambda state: state == "healthy")
    assert placed(llm) == before
    await check_streams(llm)
    assert await used(llm) == {0, 1}
    await until_idle(llm)


async def test_the_end_of_the_head_s_process_ends_the_cores(
    start_node: StartNode, invitation: Path, fake_model: str
) -> None:
    node = start_node(2)
    program = (
        "import sys, time\n"
        "from sidestep import AsyncLLM, EngineArgs\n"
        f"llm = AsyncLLM.from_engine_args(EngineArgs(model={fake_model!r}, device='fake', "
        f"placer='join', head_address='127.0.0.1:0', invitation_file={str(invitation)!r}))\n"
        "print('serves', flush=True)\n"
        "sys.stdin.read()\n"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
    )
    with head:
        assert head.stdout is not None and head.stdout.readline() == b"serves\n"
        processes = psutil.Process(node.pid).children(recursive=True)
        assert len(processes) >= 2
        head.kill()
    assert psutil.wait_procs(processes, LIMIT_S)[1] == []
    assert node.wait(LIMIT_S) == 1


async def test_a_node_ends_well_when_the_engine_is_shut_down(
    start_node: StartNode, make_joined: MakeLLM, invitation: Path
) -> None:
    node = start_node(2)
    llm = make_joined(data_parallel_size=1)
    assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
    processes = psutil.Process(node.pid).children(recursive=True)
    llm.shutdown()
    assert node.wait(LIMIT_S) == 0
    assert psutil.wait_procs(processes, LIMIT_S)[1] == []
    assert not invitation.exists()


async def test_joined_frontends_use_replicas_on_other_hosts(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    victim = start_node(2)
    start_node(3)
    llm = make_joined(fake_step_ms=2.0)
    guest = AsyncLLM.join(await llm.invite())
    try:
        await check_streams(guest)
        streams = [asyncio.create_task(check_streams(each, 8, 300)) for each in (llm, guest)]
        await until_stats(llm, num_running=16)
        victim.kill()
        await asyncio.gather(*streams)
        start_node(2)

        async def healths() -> set[str]:
            return {llm.health, guest.health}

        await until(healths, lambda found: found == {"healthy"})
        await check_streams(guest)
        assert await used(guest) == {0, 1}
    finally:
        guest.shutdown()

    async def reserved() -> int:
        return len(addresses._reserved)

    await until(reserved, lambda count: count == 0)  # no port is kept for who has left


async def test_strangers_at_the_ports_change_nothing(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    start_node(2)
    start_node(3)
    llm = make_joined(fake_step_ms=2.0)
    placer = llm._replicas.placer
    assert isinstance(placer, JoinPlacer)
    ports = [
        each.laddr.port
        for each in psutil.Process().net_connections("tcp4")
        if each.status == psutil.CONN_LISTEN and each.laddr.ip == "127.0.0.1"
    ]
    head_port = int(placer.head.address.rpartition(":")[2])
    assert head_port in ports and len(ports) == 5  # two for each replica
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    garbage = os.urandom(100_000)
    for port in ports:
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(ConnectionError):
            stranger.sendall(garbage)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[zmq.Socket[bytes]] = []
    for key in (None, curve.fresh_keys().public):
        for port in ports:
            peers.append(peer := context.socket(zmq.DEALER))
            if key is not None:
                curve.connect(peer, key)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(b"word")

    async def refused() -> int:
        return llm.num_refused_peers

    await until(refused, lambda count: count >= 3 * len(ports))
    context.destroy(linger=0)
    await streams
    assert llm.health == "healthy" and not llm.recovery.restarts
    await until_idle(llm)


async def test_a_start_without_hosts_ends_in_time(make_joined: MakeLLM) -> None:
    with pytest.raises(EngineStartError, match=r"no host with room .* has come in 0.2 s"):
        make_joined(placer_timeout=0.2)


@pytest.mark.parametrize("kind", ["pipeline_parallel_size", "tensor_parallel_size"])
async def test_a_replica_that_fits_no_host_has_ranks_on_two(
    start_node: StartNode, make_joined: MakeLLM, kind: str
) -> None:
    for number in (2, 3):
        start_node(number, "--max-ranks", "1")
    llm = make_joined(data_parallel_size=1, fake_step_ms=2.0, **{kind: 2})
    assert placed(llm) == {"h2": (0,), "h3": (0,)}
    await check_streams(llm)


async def test_the_end_of_a_host_with_one_rank_costs_time_only(
    start_node: StartNode, make_joined: MakeLLM
) -> None:
    nodes = {f"h{number}": start_node(number, "--max-ranks", "1") for number in (2, 3)}
    llm = make_joined(data_parallel_size=1, fake_step_ms=2.0, pipeline_parallel_size=2)
    streams = asyncio.create_task(check_streams(llm, length=300))
    await until_stats(llm, num_running=16)
    with_relay = next(name for name, node in nodes.items() if relays(node.pid))
    nodes[with_relay].kill()

    async def hosts() -> list[str]:
        return list(placed(llm))

    await until(hosts, lambda names: with_relay not in names)
    start_node(int(with_relay[1:]), "--max-ranks", "1")
    await streams
    assert llm.health == "healthy"


def relays(pid: int) -> list[psutil.Process]:
    """Return the relays that an agent has started."""
    return [each for each in psutil.Process(pid).children() if each.cmdline()[-1:] == ["relay"]]
