"""Watches for the end of connections, of socket files and of TCP with keys.

A port is open to strangers. A stranger that is refused ends its connection too, which must not be
taken for the end of the peer.
"""

from __future__ import annotations

import selectors
from typing import Protocol

import zmq

from sidestep.ipc.transport.curve import PeerWatch
from sidestep.ipc.transport.monitor import Monitor, Socket


class EndWatch(Protocol):
    """Looks at connections; the thread that owns the sockets uses it."""

    num_refused: int
    """Strangers that have been refused so far."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `has_ended` may have changed."""

    def has_ended(self) -> bool:
        """Return whether a peer has left since the last call."""

    def close(self) -> None:
        """Stop looking; before the sockets are closed."""


class LocalEnds:
    """Looks at the connections of a socket file."""

    def __init__(self, socket: Socket) -> None:
        """Begin to look; before the socket is bound or connected."""
        self.num_refused = 0
        self._monitor = Monitor(socket, zmq.Event.DISCONNECTED)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `has_ended` may have changed."""
        return self._monitor.fileno()

    def has_ended(self) -> bool:
        """Return whether a peer has left since the last call."""
        has_ended = False
        while self._monitor.next_report() is not None:
            has_ended = True
        return has_ended

    def close(self) -> None:
        """Stop looking; before the socket is closed."""
        self._monitor.close()


class RemoteEnds:
    """Looks at the connections of sockets with keys."""

    def __init__(self, *sockets: Socket) -> None:
        """Begin to look; before the sockets are bound or connected."""
        self.num_refused = 0
        self._watches = [PeerWatch(socket) for socket in sockets]
        self._selector = selectors.DefaultSelector()
        for watch in self._watches:
            self._selector.register(watch.fileno(), selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `has_ended` may have changed."""
        return int(self._selector.fileno())

    def has_ended(self) -> bool:
        """Return whether a peer has left since the last call."""
        news = [watch.take() for watch in self._watches]
        self.num_refused += sum(one.refused for one in news)
        return any(one.left for one in news)

    def close(self) -> None:
        """Stop looking; before the sockets are closed."""
        self._selector.close()
        for watch in self._watches:
            watch.close()
