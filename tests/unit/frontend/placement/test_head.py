"""The head, with hosts that the test plays: which it takes, and whose end it reports."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.placement import cores as cores_module
from sidestep.frontend.placement import head as head_module
from sidestep.frontend.placement.head import Head
from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.hosts.node_messages import (
    CoreEnded,
    EndCore,
    EndRelay,
    FromNode,
    HeadBeat,
    Hello,
    Leave,
    NodeBeat,
    RelayEnded,
    RelayStarted,
    StartCore,
    StartRelay,
    ToNode,
    WatchWorkers,
    decode_to_node,
    encode_node_message,
    keys_of_file,
    own_version,
)
from sidestep.ipc.processes.core_args import CoreArgs, StartAgain
from sidestep.ipc.processes.rank_hosts import RankHost, RelayDoor
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.black_box import NotedRequest, Recorded

LIMIT_S = 60.0
Message = TypeVar("Message", bound=ToNode)
AHEAD_NS = 10**15
"""Nanoseconds by which the clock of a played host is ahead."""


class Host:
    """A host that the test plays. It answers beats while it waits for messages."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], head: Head, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        curve.connect(self.socket, head.invitation.server_key)
        self.socket.connect(f"tcp://{head.address}")

    def say(self, message: FromNode) -> None:
        self.socket.send(encode_node_message(message))

    def join(self, **more: Any) -> Host:
        given: dict[str, Any] = {
            "name": self.name,
            "address": "127.0.0.2",
            "version": own_version(),
            "boot": self.name,
            "num_cores": 2,
            "gpus": [],
            "max_replicas": 1,
        }
        self.say(Hello(**(given | more)))
        self.hear(HeadBeat)
        return self

    def hear(self, kind: type[Message]) -> Message:
        """Return the next message of a kind; only beats may come before it."""
        while True:
            assert self.socket.poll(int(LIMIT_S * 1000)), f"no {kind} has come"
            message = decode_to_node(self.socket.recv())
            if isinstance(message, HeadBeat):
                now = time.monotonic_ns() + AHEAD_NS
                self.say(NodeBeat(sent_ns=message.sent_ns, now_ns=now))
            if isinstance(message, kind):
                return message
            assert isinstance(message, HeadBeat), message

    def end(self, number: int, notes: Recorded | None = None) -> None:
        now = time.monotonic_ns() + AHEAD_NS
        self.say(CoreEnded(core=number, cause="it was killed", now_ns=now, notes=notes))


@pytest.fixture
def head() -> Iterator[Head]:
    """Yield a head that waits for hosts for long."""
    made = Head("127.0.0.1", 0, LIMIT_S)
    yield made
    made.close()


@pytest.fixture
def new(head: Head) -> Iterator[Callable[[str], Host]]:
    """Yield a function that makes hosts."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hosts: list[Host] = []

    def make(name: str) -> Host:
        hosts.append(Host(context, head, name))
        return hosts[-1]

    yield make
    context.destroy(linger=0)


def args(replica: int = 0, again: StartAgain | None = None, **options: Any) -> CoreArgs:
    given = {"device": "fake"} | options
    config = EngineArgs(**given).create_engine_config()
    return CoreArgs(config=config, clients=(), replica=replica, again=again)


def death_of(core: RemoteCore) -> str:
    causes: queue.SimpleQueue[str] = queue.SimpleQueue()
    core.on_death(causes.put)
    return causes.get(timeout=LIMIT_S)


def test_another_version_is_refused(head: Head, new: Callable[[str], Host]) -> None:
    host = new("h2")
    host.say(
        Hello(name="h2", address="", version="0", boot="", num_cores=1, gpus=[], max_replicas=1)
    )
    leave = host.hear(Leave)
    assert leave.is_error and "it has version 0" in leave.reason
    assert head.hosts == []


def test_a_message_that_cannot_be_read_ends_its_host_alone(
    head: Head, new: Callable[[str], Host]
) -> None:
    good, bad = new("h2").join(), new("h3").join()
    first, second = head.place(args(0)), head.place(args(1))
    good.hear(StartCore)
    bad.hear(StartCore)
    bad.socket.send(b"\xff garbage")
    assert "cannot be read" in bad.hear(Leave).reason
    assert death_of(second).startswith("host h3 has gone: a message cannot be read")
    assert second.end_is_of_host and not first.wait(0)


def test_a_host_that_was_given_up_is_told_so(head: Head, new: Callable[[str], Host]) -> None:
    host = new("h2")
    host.say(NodeBeat(sent_ns=0, now_ns=0))
    assert host.hear(Leave).is_error


def test_a_silent_host_is_given_up(
    monkeypatch: pytest.MonkeyPatch, new: Callable[[str], Host], head: Head
) -> None:
    host = new("h2").join()
    core = head.place(args())
    host.hear(StartCore)
    monkeypatch.setattr(head_module, "BEAT_S", 0.01)
    assert death_of(core) == "host h2 has gone: no heartbeat for 0.03 s"
    assert core.end_is_of_host and core.recorded() is None
    assert host.hear(Leave).is_error


def test_the_end_of_a_connection_is_the_end_of_the_host(
    head: Head, new: Callable[[str], Host]
) -> None:
    host = new("h2").join()
    core = head.place(args())
    host.hear(StartCore)
    host.socket.close(linger=0)
    assert death_of(core) == "host h2 has gone: its connection has ended"


def test_a_core_that_cannot_be_reached_is_killed(
    monkeypatch: pytest.MonkeyPatch, head: Head, new: Callable[[str], Host]
) -> None:
    monkeypatch.setattr(cores_module, "_REPORT_S", 0.01)
    host = new("h2").join()
    core = head.place(args())
    number = host.hear(StartCore).core
    core.link_ended()
    assert death_of(core) == "the connection to the engine core on host h2 has ended"
    assert host.hear(EndCore).kills
    later = head.place(args(1))
    assert later.host is None, "the room is free when the core has ended"
    host.end(number)
    assert host.hear(StartCore).args.replica == 1


def test_cores_wait_for_room_and_have_gpus_of_their_own(
    head: Head, new: Callable[[str], Host]
) -> None:
    cores = [head.place(args(i, device="cuda", tensor_parallel_size=2)) for i in range(3)]
    new("h2").join(max_replicas=9)  # without GPUs
    host = new("h3").join(gpus=["4", "5", "6", "7", "8"], max_replicas=5)
    orders = [host.hear(StartCore) for _ in range(2)]
    assert [order.gpus for order in orders] == [["4", "5"], ["6", "7"]]
    assert [order.args.replica for order in orders] == [0, 1]
    assert cores[2].host is None and not cores[2].wait(0)
    host.end(orders[0].core)
    assert death_of(cores[0]) == "it was killed on host h3" and not cores[0].end_is_of_host
    assert host.hear(StartCore).gpus == ["4", "5"]
    assert cores[2].host == "h3"


def test_cores_are_spread_and_names_are_made_unique(head: Head, new: Callable[[str], Host]) -> None:
    hosts = [new("h").join(max_replicas=2) for _ in range(2)]
    cores = [head.place(args(replica)) for replica in range(4)]
    found = [host.hear(StartCore).args.replica for host in hosts for _ in range(2)]
    assert found == [0, 2, 1, 3]
    assert [core.host for core in cores] == ["h", "h-2", "h", "h-2"]


def test_a_core_may_be_kept_for_a_host(head: Head, new: Callable[[str], Host]) -> None:
    core = head.place(args(), ["h3"])
    new("h2").join()
    wanted = new("h3").join()
    wanted.hear(StartCore)
    assert core.host == "h3"


def test_notes_come_back_in_the_time_of_the_head(head: Head, new: Callable[[str], Host]) -> None:
    host = new("h2").join()
    core = head.place(args())
    number = host.hear(StartCore).core
    now = time.monotonic_ns()
    request = NotedRequest(
        request_id="one",
        frontend=0,
        num_choices=1,
        num_prompt_tokens=1,
        arrival_ns=now + AHEAD_NS,
        scheduled_ns=None,
    )
    host.end(number, Recorded([], [], [request]))
    death_of(core)
    recorded = core.recorded()
    assert recorded is not None
    assert abs(recorded.requests[0].arrival_ns - now) < LIMIT_S * 1e9 < AHEAD_NS


def test_process_ids_of_another_host_mean_nothing(head: Head, new: Callable[[str], Host]) -> None:
    again = StartAgain(1, 0.0, (7, 8))
    first = new("h2").join()
    head.place(args())
    first.end(first.hear(StartCore).core)
    head.place(args(again=again))
    order = first.hear(StartCore)
    assert order.args.again == again
    first.socket.close(linger=0)
    head.place(args(again=again))
    there = new("h3").join().hear(StartCore).args.again
    assert there is not None and there.pids == () and there.number == 1


def test_a_core_that_waits_can_be_let_go(head: Head, new: Callable[[str], Host]) -> None:
    core = head.place(args())
    core.stop()
    assert core.wait(0)
    new("h2").join()
    assert [host.replicas for host in head.hosts] in ([], [()])


def test_workers_are_watched_by_their_host(head: Head, new: Callable[[str], Host]) -> None:
    host = new("h2").join()
    core = head.place(args())
    number = host.hear(StartCore).core
    assert not core.computes([5, 6])
    assert host.hear(WatchWorkers).worker_pids == [5, 6]
    host.say(NodeBeat(sent_ns=0, now_ns=0, computing=[number, 99]))
    host.end(number)
    death_of(core)
    assert core.computes([5, 6]) and not core.computes([5, 6])


class TestRanks:
    """Replicas whose ranks have several hosts."""

    def both(self, new: Callable[[str], Host]) -> tuple[Host, Host]:
        hosts = (new("h2"), new("h3"))
        for number, host in enumerate(hosts, 2):
            host.join(max_ranks=2, address=f"127.0.0.{number}")
        return hosts

    def test_the_core_starts_when_its_relays_listen(
        self, head: Head, new: Callable[[str], Host]
    ) -> None:
        first, second = self.both(new)
        core = head.place(args(pipeline_parallel_size=4))
        relay = second.hear(StartRelay).relay
        assert core.host == "h2, h3"
        second.say(RelayStarted(relay=relay, port=7, server_key="key"))
        order = first.hear(StartCore)
        here, there = order.args.rank_hosts
        assert here == RankHost("h2", "127.0.0.2", 0, 2)
        assert there == RankHost("h3", "127.0.0.3", 2, 2, relay=RelayDoor(7, "key"))
        second.socket.close(linger=0)
        assert death_of(core).startswith("host h3 has gone") and core.end_is_of_host
        assert first.hear(EndCore).kills

    def test_a_relay_that_cannot_start_ends_the_core(
        self, head: Head, new: Callable[[str], Host]
    ) -> None:
        _, second = self.both(new)
        core = head.place(args(pipeline_parallel_size=3))
        second.say(RelayEnded(relay=second.hear(StartRelay).relay, cause="no port"))
        assert death_of(core) == "no port on host h3"
        again = head.place(args(pipeline_parallel_size=3))
        second.hear(StartRelay)
        again.stop()
        second.hear(EndRelay)

    def test_stages_stay_whole_where_they_can(self, head: Head, new: Callable[[str], Host]) -> None:
        first = new("h2").join(max_ranks=3)
        second = new("h3").join(max_ranks=2)
        head.place(args(tensor_parallel_size=2, pipeline_parallel_size=2))
        relay = second.hear(StartRelay).relay
        second.say(RelayStarted(relay=relay, port=7, server_key="key"))
        hosts = first.hear(StartCore).args.rank_hosts
        assert [(host.name, host.num_ranks) for host in hosts] == [("h2", 2), ("h3", 2)]


def test_hosts_that_share_a_secret_have_the_key(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("too short\n")
    with pytest.raises(ValidationError, match="head_key_file: .* less than 32 characters"):
        keys_of_file(str(file))
    with pytest.raises(ValidationError, match="head_key_file: .*No such file"):
        keys_of_file(str(tmp_path / "none"))
    file.write_text("0123456789abcdef" * 2 + "\n")
    keys = keys_of_file(str(file))
    assert keys == keys_of_file(str(file))
    head = Head("127.0.0.1", 0, LIMIT_S, keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    host = Host(context, head, "h2").join()
    assert head.invitation.server_key == keys.public and host.name == "h2"
    context.destroy(linger=0)
    head.close()


def test_a_start_without_room_ends_in_time() -> None:
    head = Head("127.0.0.1", 0, 0.01)
    core = head.place(args())
    assert death_of(core) == "no host with room for it has come in 0.01 s (hosts: none)"
    again = head.place(args(again=StartAgain(1, 0.0, ())))
    assert not again.wait(0.05), "a later start waits for ever"
    head.close()
    assert again.wait(0)
