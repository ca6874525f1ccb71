"""Placers: the rules that all of them keep, with cores on the fake device."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.placement.make_placer import make_placer
from sidestep.frontend.placement.placer import PlacedCore, Placer
from sidestep.ipc.common import registry
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.addresses import remove_address
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.transport.channels import CoreChannel, FrontendChannel
from sidestep.ipc.transport.messages import Answer, Call, Ready
from tests.ray_cluster.nodes import Nodes, imported_ray, ray_nodes
from tests.unit.frontend.placement.hosts import joined

LIMIT_S = 60.0


@contextmanager
def local() -> Iterator[Placer]:
    """Begin the placer of this machine."""
    placer = make_placer(config("local"))
    placer.begin()
    yield placer
    placer.close()


@contextmanager
def join() -> Iterator[Placer]:
    """Begin the placer of hosts that join, and one such host."""
    with joined("127.0.0.2") as (placer, _):
        yield placer


@contextmanager
def ray() -> Iterator[Placer]:
    """Begin the placer of Ray's nodes, in the cluster of the fixture."""
    placer = make_placer(config("ray"))
    placer.begin()
    yield placer
    placer.close()


BEGINNINGS: dict[str, Callable[[], AbstractContextManager[Placer]]] = {
    "join": join,
    "local": local,
    "ray": ray,
}
"""For each placer: begins it with a host that has room for one core."""


def config(name: str) -> EngineConfig:
    return EngineArgs(device="fake", placer=name).create_engine_config()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Start a Ray cluster of one node; skip the test where Ray is not installed."""
    imported_ray()
    with ray_nodes(1) as nodes:
        yield nodes


@pytest.fixture(params=sorted(registry.PLACERS))
def placer(request: pytest.FixtureRequest) -> Iterator[Placer]:
    """Yield each placer in turn."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    with BEGINNINGS[request.param]() as begun:
        yield begun


@pytest.fixture
def channel(placer: Placer) -> Iterator[FrontendChannel]:
    channel = FrontendChannel(placer.new_address())
    yield channel
    channel.close()


def start(placer: Placer, channel: FrontendChannel) -> tuple[PlacedCore, Ready]:
    """Return a core that serves, and its first message."""
    core = placer.place(CoreArgs(config=placer.config, clients=(channel.address.for_core,)))
    ready = channel.wait_message(LIMIT_S)
    assert isinstance(ready, Ready)
    channel.seal()
    return core, ready


def test_a_core_serves_and_its_kill_is_told(placer: Placer, channel: FrontendChannel) -> None:
    core, ready = start(placer, channel)
    assert not core.wait(0)
    assert not core.computes(ready.worker_pids)
    channel.send(Call(client=0, call_id=1, method="ping"))
    answer = channel.wait_message(LIMIT_S)
    assert isinstance(answer, Answer) and answer.call_id == 1
    causes: queue.SimpleQueue[str] = queue.SimpleQueue()
    core.on_death(causes.put)
    core.kill(ready.worker_pids)
    cause = causes.get(timeout=LIMIT_S)
    assert "was killed by SIGKILL" in cause and cause == core.death_cause()
    assert core.wait(0) and not core.end_is_of_host
    recorded = core.recorded()
    assert recorded is not None and recorded.requests == []
    later: queue.SimpleQueue[str] = queue.SimpleQueue()
    core.on_death(later.put)
    assert later.get(timeout=LIMIT_S) == cause
    core.stop()
    core.stop()


def test_a_core_that_is_let_go_ends_without_a_death(
    placer: Placer, channel: FrontendChannel
) -> None:
    core, _ = start(placer, channel)
    causes: queue.SimpleQueue[str] = queue.SimpleQueue()
    core.on_death(causes.put)
    core.let_go()
    assert core.wait(LIMIT_S)
    core.stop()
    core.on_death(causes.put)
    assert causes.empty()


def test_a_core_that_cannot_start_says_why(placer: Placer, channel: FrontendChannel) -> None:
    refused = CoreArgs(config=placer.config, clients=(channel.address.for_core,), replica=0)
    core = placer.place(refused)
    core.stop()
    assert core.wait(0)


def test_each_address_is_another_and_takes_a_core_of_any_process(placer: Placer) -> None:
    first, second = placer.new_address(), placer.new_address()
    assert first != second
    frontends = [FrontendChannel(first), FrontendChannel(second)]
    core = CoreChannel([first, second])
    ready = Ready(
        max_model_len=1, num_kv_blocks=1, block_size=1, device="", core_pid=1, worker_pids=[]
    )
    core.broadcast(ready)
    for frontend in frontends:
        assert frontend.wait_message(LIMIT_S) == ready
        frontend.close()
    core.close()
    unused = placer.new_address()
    remove_address(unused)
