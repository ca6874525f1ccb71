"""The connection between a core and the relay of another host: one TCP stream with CURVE keys.

A parcel is one frame: a header with its kind and a rank, then the payload. Orders to the workers
and their replies pass as they are in the rings, under the same kinds. `LinkKind` has the kinds that
only the two ends know.

ZeroMQ sends heartbeats by itself. A host that is silent for three seconds has gone, and so has one
whose connection has ended: nothing connects a second time, since messages may have been lost.
"""

from __future__ import annotations

import enum
import os
import select
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import zmq

from sidestep.ipc.processes.rank_hosts import RankHost, RelayDoor, tcp_address
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.curve import PeerWatch
from sidestep.ipc.transport.shm_ring import RingClosed

_HEADER = struct.Struct("<HHI")
"""Kind, rank, and nothing, so that payloads begin at multiples of 8 bytes."""
_LINGER_MS = 1000
"""Milliseconds for which a closing end still delivers parcels."""
JOIN_S = 20.0
"""Seconds in which a core must reach a relay, which listens before the core knows its address."""


class LinkKind(enum.IntEnum):
    """Kinds of parcel between a core and a relay; those of workers are smaller numbers."""

    BEGIN = 32
    """To the relay, JSON of RelayJob: start the ranks."""
    ASK_DEVICES = 33
    """To the relay, JSON of RanksJob: say what the GPUs of these ranks need."""
    DEVICES = 34
    """To the core, JSON of the answer: a text, or null."""
    KILL = 35
    """To the relay, empty: kill the workers."""
    BEAT = 36
    """To the core, JSON of Beat, again and again."""
    BEAT_TAKEN = 37
    """To the relay, JSON of BeatTaken: the answer to a beat."""


class Beat(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The state of a relay's host."""

    cpu_seconds: float | None
    """CPU time of the ranks; None if one has ended, or if the system does not tell it."""
    is_halted: bool
    """Whether a rank is stopped."""
    num_refused: int
    """Connections of strangers that the relay has refused so far."""
    sent_ns: int
    """The relay's monotonic clock."""
    ahead_ns: int
    """Nanoseconds by which the relay's clock is ahead of the core's, as far as is known."""


class BeatTaken(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The core's answer to a beat, by which the relay compares the clocks."""

    sent_ns: int
    """The time of the beat, by the relay's clock."""
    taken_ns: int
    """The core's monotonic clock."""


class Parcel(NamedTuple):
    """A message that has come over a link."""

    kind: int
    rank: int
    data: memoryview


class Link:
    """One end of the connection. Not thread-safe."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # PAIR takes one peer. Bytes of strangers never come here: see curve.py.
        self._socket = self._context.socket(zmq.PAIR)
        # No high-water mark: the core bounds the steps in flight.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._watch = PeerWatch(self._socket)
        self._bell = os.pipe()
        """Rung when a send has used up the socket's news of a parcel."""
        for end in self._bell:
            os.set_blocking(end, False)
        self.has_joined = False
        self.num_refused = 0
        self.lost: str | None = None
        """Why the other end has gone; None while it is there."""

    def __repr__(self) -> str:
        state = self.lost or ("connected" if self.has_joined else "waiting")
        return f"{type(self).__name__}({state})"

    def filenos(self) -> list[int]:
        """Return descriptors, one of which is readable when `receive` may have something."""
        return [int(self._socket.getsockopt(zmq.FD)), self._watch.fileno(), self._bell[0]]

    def send(self, kind: int, rank: int, parts: Iterable[bytes | memoryview]) -> None:
        """Queue a parcel made of byte buffers. Raises RingClosed if the other end has gone."""
        if self.lost is not None:
            raise RingClosed(self.lost)
        try:
            self._socket.send(b"".join((_HEADER.pack(kind, rank, 0), *parts)), zmq.NOBLOCK)
        except zmq.Again:
            raise RingClosed("nobody is connected") from None
        if self._has_parcel:
            os.write(self._bell[1], b"\0")

    def receive(self) -> Parcel | None:
        """Return the next parcel; None if there is none, and then the descriptors are silent.

        Parcels that the other end sent before it went are still returned.
        """
        if not self._has_parcel:
            self._look()
            if not self._has_parcel:
                return None
        frame = memoryview(self._socket.recv(zmq.NOBLOCK))
        kind, rank, _ = _HEADER.unpack_from(frame)
        return Parcel(kind, rank, frame[_HEADER.size :])

    def close(self) -> None:
        """Close the connection, after what is queued has been sent. May be called twice."""
        if self._socket.closed:
            return
        linger = _LINGER_MS if self.lost is None and self.has_joined else 0
        self._watch.close()
        self._context.destroy(linger=linger)
        for end in self._bell:
            os.close(end)

    @property
    def _has_parcel(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _look(self) -> None:
        """Silence the bell, and take the news of connections."""
        try:
            os.read(self._bell[0], 4096)
        except BlockingIOError:
            pass
        news = self._watch.take()
        self.num_refused += news.refused
        # Messages may be lost between two connections of the same core.
        has_left = news.left > 0 or (self.has_joined and news.joined > 0) or news.joined > 1
        self.has_joined |= news.joined > 0
        if has_left:
            self._lose()

    def _lose(self) -> None:
        if self.lost is None:
            self.lost = f"the connection has ended, or was silent for {curve.SILENCE_S:g} s"


class CoreLink(Link):
    """The core's end."""

    def __init__(self, host: RankHost) -> None:
        """Begin to connect to the relay of a host."""
        super().__init__()
        assert host.relay is not None, "the core's own host has no relay"
        self._until = time.monotonic() + JOIN_S
        curve.connect(self._socket, host.relay.server_key)
        self._socket.setsockopt(zmq.IPV6, ":" in host.address)
        self._socket.connect(tcp_address(host.address, host.relay.port))

    def _look(self) -> None:
        super()._look()
        if self.has_joined or self.lost is not None:
            return
        if self.num_refused:
            self.lost = "the relay has refused the connection"
        elif time.monotonic() > self._until:
            self.lost = f"the relay could not be reached in {JOIN_S:g} s"

    def wait(self, timeout_s: float) -> None:
        """Wait for a parcel or for news of the connection, for `timeout_s` seconds at most."""
        select.select(self.filenos(), [], [], timeout_s)


class RelayLink(Link):
    """The relay's end, which listens."""

    def __init__(self, address: str) -> None:
        """Listen at an address of this host, and at a port that is free. Raises zmq.ZMQError."""
        super().__init__()
        keys = curve.fresh_keys()
        curve.listen(self._socket, keys)
        self._socket.setsockopt(zmq.IPV6, ":" in address)
        self._socket.bind(tcp_address(address, 0))
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.door = RelayDoor(int(bound.rstrip(b"\0").rpartition(b":")[2]), keys.public)

    def _look(self) -> None:
        super()._look()
        # The watch may take the core for a stranger, if a stranger is at the door too. A socket
        # that listens cannot be written to without a peer.
        writable = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT
        if self.has_joined and not writable:
            self._lose()
