"""ZeroMQ between frontends and the core: one PUSH/PULL pair a frontend, bound by the frontend.

Sending never waits (ZeroMQ's own threads do the I/O), receiving drains what is there. Both ends expose a descriptor to
wait on. ZeroMQ's descriptor is edge-triggered: after it fires, and before waiting on it again, a socket must be read
until it is empty; `receive` always does.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence

import zmq

from sidestep.ipc.core_args import ClientAddress
from sidestep.ipc.messages import ToCore, ToFrontend, decode_to_core, decode_to_frontend, encode

logger = logging.getLogger(__name__)
_LINGER_MS = 1000


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    # No high-water mark: dropping or waiting would both break the engine. The queue is bounded by admission.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


class FrontendChannel:
    """A frontend's end. Not thread-safe: one thread sends and receives."""

    def __init__(self) -> None:
        # A private folder (mode 0700), so that no other user can talk to the engine.
        self._folder = tempfile.mkdtemp(prefix="sidestep-")
        self.address = ClientAddress(
            to_core=f"ipc://{self._folder}/{uuid.uuid4().hex[:8]}", from_core=f"ipc://{self._folder}/{uuid.uuid4().hex[:8]}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out, self._in = _open(self._context, zmq.PUSH), _open(self._context, zmq.PULL)
        self._out.bind(self.address.to_core)
        self._in.bind(self.address.from_core)

    def wait_message(self, timeout_s: float) -> ToFrontend | None:
        """The next message, waiting for it at most this long."""
        if not self._in.poll(int(timeout_s * 1000)):
            return None
        return decode_to_frontend(self._in.recv())

    def seal(self) -> None:
        """Removes the socket files, once the core has connected: from then on nothing can be left behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: ToCore) -> None:
        """Queues a message; never waits."""
        self._out.send(encode(message))

    def fileno(self) -> int:
        """Readable when `receive` may have something."""
        return int(self._in.getsockopt(zmq.FD))

    def receive(self) -> list[ToFrontend]:
        """All messages that are there."""
        return [decode_to_frontend(frame) for frame in _drain(self._in)]

    def close(self) -> None:
        """Closes the sockets. May be called twice."""
        self.seal()
        self._context.destroy(linger=0)


class CoreChannel:
    """The core's end of all its frontends' channels. Used by the busy loop's thread only."""

    def __init__(self, clients: Sequence[ClientAddress]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = _open(self._context, zmq.PULL)
        self._out: list[zmq.Socket[bytes]] = []
        for client in clients:
            self._in.connect(client.to_core)
            out = _open(self._context, zmq.PUSH)
            out.connect(client.from_core)
            self._out.append(out)

    def receive(self) -> list[ToCore]:
        """All messages that are there. One that cannot be read is logged and dropped: it must not end the engine."""
        messages: list[ToCore] = []
        for frame in _drain(self._in):
            try:
                messages.append(decode_to_core(frame))
            except ValueError as error:
                logger.warning("dropped a message of %d bytes: %s", len(frame), error)
        return messages

    def send(self, client: int, message: ToFrontend) -> None:
        """Queues a message for one frontend; never waits."""
        self._out[client].send(encode(message))

    def broadcast(self, message: ToFrontend) -> None:
        """Queues a message for every frontend."""
        for client in range(len(self._out)):
            self.send(client, message)

    def fileno(self) -> int:
        """Readable when `receive` may have something."""
        return int(self._in.getsockopt(zmq.FD))

    def close(self) -> None:
        """Delivers what is queued, for a second at most, then closes."""
        self._context.destroy(linger=_LINGER_MS)


def process_exists(pid: int) -> bool:
    """Whether a process with this id is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
