"""Keys for sockets between hosts: CURVE, by which ZeroMQ encrypts and authenticates (CurveZMQ).

The side that listens makes a key pair for each socket. A peer must know its public key to connect,
and the handshake never shows that key: so it is a secret between the two sides, which travels in an
invitation. A peer without it, and a stranger that sends anything else, is refused before any of its
bytes reach a reader. `PeerWatch` counts those.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from sidestep.ipc.transport.monitor import Monitor

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats on a connection; ZeroMQ sends and answers them by itself."""
SILENCE_S = 3.0
"""Seconds without a sign of the peer after which a connection is cut."""
_HANDSHAKE_S = 10.0
"""Seconds that a peer has for its handshake."""
_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)


@dataclass(frozen=True)
class CurveKeys:
    """The key pair of a listening socket, as z85 text of 40 characters each."""

    public: str = field(repr=False)
    """The key that a peer must know to connect; nobody else may."""
    secret: str = field(repr=False)
    """The key that the listening process alone knows."""


def fresh_keys() -> CurveKeys:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def listen(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Have a socket refuse peers that do not know the public key; before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    _tend(socket)


def connect(socket: zmq.Socket[bytes], server_key: str) -> None:
    """Have a socket use the public key of the side that listens; before it is connected.

    Raises zmq.ZMQError if the text is no key.
    """
    own = fresh_keys()
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    _tend(socket)


def _tend(socket: zmq.Socket[bytes]) -> None:
    """Bound the time for handshakes, and cut connections whose peer is silent."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))


def keys_of_secret(text: str) -> CurveKeys:
    """Return the key pair that belongs to a secret text, always the same one."""
    secret = z85.encode(hashlib.sha256(b"sidestep head\n" + text.encode()).digest())
    return CurveKeys(zmq.curve_public(secret).decode(), secret.decode())


class PeerNews(NamedTuple):
    """Peers of a socket that have come, have been refused and have left since the last look."""

    joined: int = 0
    refused: int = 0
    """Connections that ended before a handshake had succeeded."""
    left: int = 0
    """Connections that ended after it."""


class PeerWatch:
    """Looks at the connections of one socket; the thread that owns the socket uses it.

    ZeroMQ does not say whose handshake has succeeded. If a stranger hangs in a handshake at the
    same moment, the first of the two to end counts as refused. So a silent peer must be found by
    heartbeats too.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Begin to look; before the socket is bound or connected."""
        self._monitor = Monitor(socket, _EVENTS)
        self._open: set[int] = set()
        """Descriptors of the connections that are open."""
        self._num_inside = 0
        """Connections among them whose handshake has succeeded."""
        self._has_failed = False
        """Whether the last event was a failed handshake; its connection ends next."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` may have something.

        It is edge-triggered, as those of all ZeroMQ's sockets are.
        """
        return self._monitor.fileno()

    def take(self) -> PeerNews:
        """Return what has happened since the last call."""
        joined = refused = left = 0
        while (report := self._monitor.next_report()) is not None:
            message: Any = parse_monitor_message(report)
            event, connection = message["event"], int(message["value"])
            if event in (zmq.Event.ACCEPTED, zmq.Event.CONNECTED):
                self._open.add(connection)
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._num_inside += 1
                joined += 1
            elif event == zmq.Event.DISCONNECTED:
                has_left = not self._has_failed and self._num_inside == len(self._open)
                self._open.discard(connection)
                self._num_inside -= has_left
                left += has_left
                refused += not has_left
            self._has_failed = event != zmq.Event.DISCONNECTED and "FAILED" in event.name
        return PeerNews(joined, refused, left)

    def close(self) -> None:
        """Stop looking; before the socket is closed."""
        self._monitor.close()
