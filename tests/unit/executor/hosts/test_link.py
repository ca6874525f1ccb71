"""The link between a core and a relay: who is there, and the cause when someone has gone."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from sidestep.executor.hosts import link
from sidestep.executor.hosts.link import CoreLink, Link, Parcel, RelayLink
from sidestep.ipc.processes.rank_hosts import RankHost, RelayDoor
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.shm_ring import RingClosed
from tests.waiting import LIMIT_S

ADDRESS = "127.0.0.2"


def next_parcel(end: Link) -> Parcel:
    """Return the next parcel, as a loop does: it reads until nothing is left, then waits."""
    until = time.monotonic() + LIMIT_S
    while (parcel := end.receive()) is None:
        assert end.lost is None and time.monotonic() < until, end
        select.select(end.filenos(), [], [], 1.0)
    return parcel


def wait_for(end: Link, happened: Callable[[], bool]) -> None:
    """Read one end until something has happened there."""
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert end.receive() is None and time.monotonic() < until, end
        select.select(end.filenos(), [], [], 0.1)


@pytest.fixture
def relay() -> Iterator[RelayLink]:
    """Yield the end that listens."""
    end = RelayLink(ADDRESS)
    yield end
    end.close()


@pytest.fixture
def core(relay: RelayLink) -> Iterator[CoreLink]:
    """Yield the end that connects."""
    end = CoreLink(host_of(relay.door))
    yield end
    end.close()


def host_of(door: RelayDoor) -> RankHost:
    return RankHost("there", ADDRESS, 1, 1, relay=door)


def test_parcels_come_as_they_were_sent(relay: RelayLink, core: CoreLink) -> None:
    core.send(3, 0, [b"to the ", memoryview(b"relay")])
    assert next_parcel(relay) == Parcel(3, 0, memoryview(b"to the relay"))
    large = bytes(range(256)) * 4096
    relay.send(1, 7, [b""])
    relay.send(2, 1, [large])
    assert next_parcel(core) == Parcel(1, 7, memoryview(b""))
    assert next_parcel(core) == Parcel(2, 1, memoryview(large))
    assert core.receive() is None


def test_a_send_does_not_hide_what_has_come_before_it(relay: RelayLink, core: CoreLink) -> None:
    """ZeroMQ's descriptor tells of a parcel once, and a send may use that up."""
    core.send(0, 0, [b"question"])
    next_parcel(relay)
    relay.send(1, 0, [b"answer"])
    until = time.monotonic() + LIMIT_S
    while not core._has_parcel:
        assert time.monotonic() < until
    core.send(0, 0, [b"another question"])
    assert select.select(core.filenos(), [], [], 0)[0]
    assert bytes(next_parcel(core).data) == b"answer"


@pytest.mark.parametrize("num_strangers", [0, 1])
def test_an_end_that_goes_is_missed_also_beside_strangers(
    relay: RelayLink, core: CoreLink, num_strangers: int
) -> None:
    core.send(0, 0, [b"last word"])
    next_parcel(relay)
    strangers = [socket.create_connection((ADDRESS, relay.door.port)) for _ in range(num_strangers)]
    core.send(0, 0, [b"very last word"])
    next_parcel(relay)
    core.close()
    wait_for(relay, lambda: relay.lost is not None)
    assert "the connection has ended" in (relay.lost or "")
    with pytest.raises(RingClosed):
        relay.send(0, 0, [b"too late"])
    for stranger in strangers:
        stranger.close()


def test_what_was_sent_before_the_end_is_read(relay: RelayLink, core: CoreLink) -> None:
    core.send(0, 0, [b"word"])
    next_parcel(relay)
    relay.send(6, 1, [b"how it ended"])
    relay.close()
    assert bytes(next_parcel(core).data) == b"how it ended"
    wait_for(core, lambda: core.lost is not None)


def test_a_core_with_another_key_is_refused(relay: RelayLink) -> None:
    core = CoreLink(host_of(replace(relay.door, server_key=curve.fresh_keys().public)))
    try:
        wait_for(core, lambda: core.lost is not None)
        assert core.lost == "the relay has refused the connection"
        wait_for(relay, lambda: relay.num_refused > 0)
        assert relay.lost is None and not relay.has_joined
    finally:
        core.close()


def test_a_relay_that_is_not_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "JOIN_S", 0.2)
    gone = RelayLink(ADDRESS)
    gone.close()
    core = CoreLink(host_of(gone.door))
    try:
        wait_for(core, lambda: core.lost is not None)
        assert core.lost == "the relay could not be reached in 0.2 s"
    finally:
        core.close()
