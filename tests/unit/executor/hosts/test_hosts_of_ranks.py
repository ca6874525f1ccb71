"""The division of a replica's ranks among hosts, as the executor and the ranks see it."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from sidestep import EngineArgs
from sidestep.executor.hosts.host_ranks import HostRanks, Said
from sidestep.executor.hosts.link import RelayLink
from sidestep.executor.hosts.local_ranks import LocalRanks
from sidestep.executor.hosts.multiproc import MultiprocExecutor, ranks_of
from sidestep.executor.hosts.relay import Relay
from sidestep.executor.hosts.remote_ranks import RemoteRanks
from sidestep.executor.processes.worker_orders import Failure, Reply
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import EngineConfig, interface_environment
from sidestep.ipc.processes.cpu_use import CpuTime, CpuUse
from sidestep.ipc.processes.rank_hosts import RankHost, start_relay
from sidestep.ipc.transport.step import StepOutput
from tests.fakes import make_request, make_scheduler
from tests.waiting import LIMIT_S


@pytest.fixture
def door() -> Iterator[RelayLink]:
    """Yield a listening relay's end."""
    end = RelayLink("127.0.0.2")
    yield end
    end.close()


def config_of(**options: Any) -> EngineConfig:
    return EngineArgs(device="fake", **options).create_engine_config()


def two(door: RelayLink, first_there: int, num_ranks: int) -> tuple[RankHost, RankHost]:
    return (
        RankHost("here", "127.0.0.1", 0, first_there, first_gpu=4),
        RankHost("there", "127.0.0.2", first_there, num_ranks - first_there, relay=door.door),
    )


def gpus(hosts: list[HostRanks]) -> list[list[int]]:
    return [[host.job.worker_args(rank).gpu_index for rank in host.ranks] for host in hosts]


def test_without_hosts_the_gpus_of_replicas_follow_one_another() -> None:
    config = config_of(tensor_parallel_size=2, data_parallel_size=3)
    hosts = ranks_of(config, 2, 0, ())
    assert gpus(hosts) == [[4, 5]]
    assert hosts[0].job.rank_name(1) == "worker 1 (tp rank 1)"


def test_a_host_of_a_whole_replica_says_which_gpus_it_has() -> None:
    config = config_of(tensor_parallel_size=2, data_parallel_size=3)
    hosts = ranks_of(config, 2, 0, [RankHost("here", "127.0.0.1", 0, 2, first_gpu=0)])
    assert gpus(hosts) == [[0, 1]]
    assert hosts[0].job.rank_name(1) == "worker 1 (tp rank 1)", "its placer names the host"
    assert hosts[0].job.address is None


@pytest.mark.parametrize(("first_there", "off"), [(2, False), (1, True)])
def test_ranks_of_two_hosts(door: RelayLink, first_there: int, off: bool) -> None:
    config = config_of(tensor_parallel_size=2, pipeline_parallel_size=2)
    hosts = ranks_of(config, 0, 0, two(door, first_there, 4))
    try:
        assert [type(host) for host in hosts] == [LocalRanks, RemoteRanks]
        assert [len(host.ranks) for host in hosts] == [first_there, 4 - first_there]
        assert gpus(hosts) == [[*range(4, 4 + first_there)], [*range(4 - first_there)]]
        assert hosts[1].job.rank_name(3) == "worker 3 (stage 1, tp rank 1) on host there"
        told = [host.job.config.parallel.disable_custom_all_reduce for host in hosts]
        assert told == [off, off], "GPUs of two hosts cannot read one another's memory"
    finally:
        hosts[1].stop()


def test_times_of_another_host_are_told_by_the_core_s_clock(door: RelayLink) -> None:
    """Have the relay's clock say that it is an hour ahead; that of its rank is not."""
    hour = 3600 * 10**9
    relay = Relay(door, lambda: time.monotonic_ns() + hour)
    thread = threading.Thread(target=relay.run)
    config = config_of(pipeline_parallel_size=2, stall_limit=1.0)
    executor = MultiprocExecutor(config, hosts=two(door, 1, 2))
    scheduler = make_scheduler(num_stages=2)
    scheduler.add(make_request([1, 2, 3]))
    thread.start()
    try:
        executor.launch()
        executor.start()
        other = executor._hosts[1]
        wait_until(executor, lambda: other.clock_ahead_ns != 0)
        assert abs(other.clock_ahead_ns - hour) < hour / 60
        assert executor.cpu_use().is_known
        step, outputs = scheduler.schedule(), list[StepOutput]()
        assert step is not None
        executor.submit(step)
        wait_until(executor, lambda: bool(outputs), outputs)
        for told in (outputs[0].received_ns, outputs[0].launched_ns, outputs[0].end_ns):
            assert abs(time.monotonic_ns() - hour - told) < hour / 60
    finally:
        executor.shutdown()
        thread.join()
        relay.end_ranks()


def test_the_rank_that_failed_first_is_named_whatever_the_clock_of_its_host(
    door: RelayLink,
) -> None:
    hour = 3600 * 10**9
    executor = MultiprocExecutor(config_of(tensor_parallel_size=2), hosts=two(door, 1, 2))
    try:
        for rank, text, at_ns, ahead_ns in [(0, "later", 200, 0), (1, "first", hour + 100, hour)]:
            failure = msgspec.json.encode(Failure(text, at_ns))
            executor._take(Said(rank, Reply.FAILED, failure), ahead_ns)
        assert executor._cause() == "worker 1 (tp rank 1) on host there: first"
    finally:
        executor._hosts[1].stop()


def wait_until(
    executor: MultiprocExecutor,
    happened: Callable[[], bool],
    outputs: list[StepOutput] | None = None,
) -> None:
    """Poll the executor until something has happened. outputs: where its outputs go."""
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until
        select.select([executor], [], [], 0.1)
        if isinstance(output := executor.poll(), StepOutput) and outputs is not None:
            outputs.append(output)


def test_cpu_time_of_other_hosts_counts() -> None:
    there: list[CpuTime | None] = [CpuTime(5.0, False)]
    use = CpuUse((), [lambda: CpuTime(1.0, False), lambda: there[0]])
    assert use.is_known and not use.has_grown()
    for time_there, grown in [
        (CpuTime(6.0, False), True),
        (CpuTime(7.0, True), False),
        (None, False),
        (CpuTime(7.0, False), True),
    ]:
        there[0] = time_there
        assert use.has_grown() is grown
    assert not CpuUse((), [lambda: None]).is_known


def test_ranks_use_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interface_environment("127.0.0.2") == loopback
    assert interface_environment("192.0.2.1") == interface_environment(None) == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_environment("127.0.0.1") == {**loopback, "NCCL_SOCKET_IFNAME": "ib0"}


def test_a_relay_needs_an_address_of_this_host() -> None:
    with pytest.raises(EngineStartError, match="a relay could not listen at 192.0.2.1"):
        start_relay("192.0.2.1")


def test_a_relay_without_a_core_ends_with_its_parent() -> None:
    relay, _ = start_relay("127.0.0.2")
    relay.stop()
    assert relay.exit_status == 0
