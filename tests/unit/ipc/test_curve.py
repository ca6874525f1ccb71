"""Sockets between hosts: who may connect, and how strangers are counted."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq

from sidestep.ipc.transport import curve
from sidestep.ipc.transport.curve import PeerNews, PeerWatch
from tests.waiting import LIMIT_S

Sockets = Callable[[int], "zmq.Socket[bytes]"]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Give new sockets of one context, which are closed at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []  # so that none is collected before it is closed

    def new(kind: int) -> zmq.Socket[bytes]:
        made.append(context.socket(kind))
        return made[-1]

    yield new
    context.destroy(linger=0)


class Door:
    """A listening socket with its keys, its port and what its watch has seen so far."""

    def __init__(self, sockets: Sockets) -> None:
        self.keys = curve.fresh_keys()
        self.socket = sockets(zmq.PULL)
        curve.listen(self.socket, self.keys)
        self._watch = PeerWatch(self.socket)
        self.port = int(self.socket.bind_to_random_port("tcp://127.0.0.2"))
        self.address = f"tcp://127.0.0.2:{self.port}"
        self.seen = PeerNews()

    def wait_for(self, *, joined: int = 0, refused: int = 0, left: int = 0) -> None:
        """Wait until at least these numbers of connections have come and gone."""
        end = time.monotonic() + LIMIT_S
        while any(a < b for a, b in zip(self.seen, (joined, refused, left), strict=True)):
            assert time.monotonic() < end, self.seen
            select.select([self._watch], [], [], 0.05)
            self.seen = PeerNews(*map(sum, zip(self.seen, self._watch.take(), strict=True)))

    def close(self) -> None:
        """Stop listening."""
        self._watch.close()
        self.socket.close(linger=0)

    def visit(self, sockets: Sockets, key: str | None) -> zmq.Socket[bytes]:
        """Return a socket that has sent a word to the door, with a key or without one."""
        peer = sockets(zmq.PUSH)
        peer.setsockopt(zmq.LINGER, 0)
        if key is not None:
            curve.connect(peer, key)
        peer.connect(self.address)
        peer.send(b"word")
        return peer

    def scribble(self, scrawl: bytes) -> None:
        """Send bytes over a connection, and close it."""
        stranger = socket.create_connection(("127.0.0.2", self.port))
        with stranger, suppress(ConnectionError):
            stranger.sendall(scrawl)


@pytest.fixture
def door(sockets: Sockets) -> Iterator[Door]:
    door = Door(sockets)
    yield door
    door.close()


def test_peer_with_the_key_is_let_in(sockets: Sockets, door: Door) -> None:
    peer = door.visit(sockets, door.keys.public)
    assert door.socket.poll(10_000)
    assert door.socket.recv() == b"word"
    door.wait_for(joined=1)
    peer.close(linger=0)
    door.wait_for(left=1)
    assert door.seen == PeerNews(joined=1, refused=0, left=1)


@pytest.mark.parametrize("key", [None, curve.fresh_keys().public], ids=["no key", "another key"])
def test_peer_without_the_key_is_refused_and_counted(
    sockets: Sockets, door: Door, key: str | None
) -> None:
    peer = door.visit(sockets, key)
    door.wait_for(refused=1)
    peer.close(linger=0)
    assert door.seen.joined == door.seen.left == 0
    assert not door.socket.poll(0)


@pytest.mark.parametrize(
    "scrawl",
    [b"", b"\xff", os.urandom(100_000), b"\x01\x00\x02\x00x" + b"\x02\x00y" * 1000],
    ids=["nothing", "half a greeting", "100,000 bytes", "an old version"],
)
def test_strangers_change_nothing(sockets: Sockets, door: Door, scrawl: bytes) -> None:
    peer = door.visit(sockets, door.keys.public)
    assert door.socket.recv() == b"word"
    door.wait_for(joined=1)
    door.scribble(scrawl)
    door.wait_for(refused=1)
    peer.send(b"another word")
    assert door.socket.recv() == b"another word"
    peer.close(linger=0)
    door.wait_for(left=1)
    assert door.seen == PeerNews(joined=1, refused=1, left=1)


def test_strangers_that_nobody_looks_at_hold_nothing_up(sockets: Sockets, door: Door) -> None:
    """By itself ZeroMQ has room for 2,000 reports of a socket: those of 1,000 strangers."""
    for _ in range(1200):
        stranger = socket.create_connection(("127.0.0.2", door.port), timeout=LIMIT_S)
        with stranger, suppress(ConnectionError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(4096):
                pass
    door.visit(sockets, door.keys.public)
    assert door.socket.poll(10_000) and door.socket.recv() == b"word"
    door.wait_for(joined=1, refused=1200)


def test_keys_are_fresh_and_not_shown() -> None:
    keys = curve.fresh_keys()
    assert keys != curve.fresh_keys()
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.public not in repr(keys) and keys.secret not in repr(keys)


def test_text_that_is_no_key_is_an_error(sockets: Sockets) -> None:
    with pytest.raises(zmq.ZMQError):
        curve.connect(sockets(zmq.PUSH), "no key")
