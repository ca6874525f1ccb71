"""The head tells a placer which cores wait for hosts of their own that are not there."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from functools import partial

import pytest
import zmq

from sidestep.frontend.placement.head import Head
from sidestep.ipc.hosts.node_messages import StartCore
from tests.unit.frontend.placement.test_head import LIMIT_S, Host, args, death_of

Events = queue.SimpleQueue[tuple[str, int | str]]


@pytest.fixture
def events() -> Events:
    return queue.SimpleQueue()


@pytest.fixture
def head(events: Events) -> Iterator[Head]:
    """Yield a head whose placer notes all that it hears."""
    made = Head(
        "127.0.0.1",
        0,
        LIMIT_S,
        on_joined=lambda name: events.put(("joined", name)),
        on_missing=lambda core: events.put(("missing", core.args.replica)),
    )
    yield made
    made.close()


@pytest.fixture
def host(head: Head) -> Iterator[Host]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield Host(context, head, "its own")
    context.destroy(linger=0)


def test_a_core_waits_for_its_own_host_and_again_once_that_has_gone(
    head: Head, host: Host, events: Events
) -> None:
    core = head.place(args(replica=1), ["its own"])
    assert events.get(timeout=LIMIT_S) == ("missing", 1)
    host.join()
    assert events.get(timeout=LIMIT_S) == ("joined", "its own")
    host.hear(StartCore)
    assert core.host == "its own" and events.empty()
    host.socket.close(linger=0)
    assert "its own has gone" in death_of(core)
    head.place(args(replica=1), ["its own"])
    assert events.get(timeout=LIMIT_S) == ("missing", 1)


def test_a_core_whose_host_will_not_come_ends_with_the_cause(head: Head) -> None:
    core = head.place(args(), ["its own"])
    head.give_up(core, "there is no room")
    assert death_of(core) == "there is no room" and not core.end_is_of_host


def test_a_core_that_is_let_go_has_left_and_one_that_dies_has_not(head: Head) -> None:
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in ("dies", "leaves"):
        core = head.place(args(), ["its own"])
        core.on_left(partial(left.put, name))
        if name == "dies":
            head.give_up(core, "it dies")
            assert death_of(core) == "it dies"
        else:
            core.let_go()
    assert left.get(timeout=LIMIT_S) == "leaves"
