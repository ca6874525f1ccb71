"""ZeroMQ between frontends and the core: one PUSH/PULL pair a frontend, bound by the frontend.

Sending never waits (ZeroMQ's own threads do the I/O), receiving drains what is there. Both ends
expose a descriptor to wait on. ZeroMQ's descriptor is edge-triggered: after it fires, and before
waiting on it again, a socket must be read until it is empty; `receive` always does.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import zmq

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.processes.addresses import ClientAddress, new_address, remove_address
from sidestep.ipc.processes.forking import close_sockets_of, keep_from_children
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.clocks import moved_to_core, moved_to_frontend
from sidestep.ipc.transport.ends import EndWatch, LocalEnds, RemoteEnds
from sidestep.ipc.transport.envelope import Refused, open_sealed, seal
from sidestep.ipc.transport.messages import ToCore, ToFrontend, decode_to_frontend, encode

logger = logging.getLogger(__name__)
_LINGER_MS = 1000
"""Milliseconds for which a closing socket still delivers messages."""
_CONNECT_MS = 10_000
"""Milliseconds for which `seal` waits for the core to connect."""


class Broken(NamedTuple):
    """A message of the core cannot be read.

    It may have had tokens of any request, so none of them can go on from what this frontend has.
    """

    cause: str


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    # There is no high-water mark, since dropping or waiting would both break the engine. Admission
    # bounds the queue.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _drain(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return all frames that have arrived: a message, or one of several that came together."""
    frames: list[bytes] = []
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


def _watch(socket: zmq.Socket[bytes], *others: zmq.Socket[bytes], is_remote: bool) -> EndWatch:
    """Return a watch of a socket's connections; `others` must be watched only if it is remote."""
    return RemoteEnds(socket, *others) if is_remote else LocalEnds(socket)


class FrontendChannel:
    """A frontend's end. Not thread-safe: one thread sends and receives."""

    def __init__(self, address: ClientAddress | None = None) -> None:
        """Listen at an address that the core knows, or at a new one.

        Raises EngineStartError if that address has been taken back.
        """
        self.address = address if address is not None else new_address()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out, self._in = _open(self._context, zmq.PUSH), _open(self._context, zmq.PULL)
        self._is_sealed = False
        self._is_ours = True
        self._gone = _watch(self._in, self._out, is_remote=self.address.is_remote)
        try:
            if self.address.server_key is not None:
                assert self.address.secret_key is not None, "it is an address for a core"
                keys = curve.CurveKeys(self.address.server_key, self.address.secret_key)
                for socket in (self._out, self._in):
                    curve.listen(socket, keys)
            self._out.bind(self.address.to_core)
            self._in.bind(self.address.from_core)
        except zmq.ZMQError:
            self._gone.close()
            self._context.destroy(linger=0)
            raise EngineStartError(
                "the engine that sent the invitation has ended, or it was used before"
            ) from None
        keep_from_children(self)

    def wait_message(self, timeout_s: float) -> ToFrontend | Broken | None:
        """Return the next message, after at most `timeout_s` seconds; None if none has come."""
        if not self._in.poll(int(timeout_s * 1000)):
            return None
        return self._decode([self._in.recv()])[0]

    def seal(self) -> None:
        """Remove the socket files, once the core has connected: then nothing can be left behind."""
        # If the core has sent something, it has connected to one end, but perhaps not to the other,
        # which it tries again and again. A PUSH socket without a peer cannot be written to.
        self._out.poll(_CONNECT_MS, zmq.POLLOUT)
        self._is_sealed = True
        remove_address(self.address)

    def send(self, *messages: ToCore) -> None:
        """Queue messages that arrive together. Never waits, once `seal` has seen the core connect.

        Messages to a core that has ended are lost; the core's end is reported separately. A forked
        child sends nothing.
        """
        if not self._is_ours:
            return
        if self.address.is_remote:
            messages = tuple(moved_to_core(each, -time.monotonic()) for each in messages)
        try:
            # The parts of one message of ZeroMQ.
            flags = zmq.NOBLOCK if self._is_sealed else 0
            self._out.send_multipart(list(map(seal, messages)), flags)
        except zmq.Again:
            # Without a peer the socket would wait for one, on the thread that must learn that the
            # peer has ended.
            pass

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` may have something."""
        return int(self._in.getsockopt(zmq.FD))

    def receive(self) -> list[ToFrontend | Broken]:
        """Return all messages that have arrived.

        Return none in a forked child, where ZeroMQ would try again for ever.
        """
        if not self._is_ours:
            return []
        return self._decode(_drain(self._in))

    def _decode(self, frames: Iterable[bytes]) -> list[ToFrontend | Broken]:
        """Return the messages up to one that cannot be read, which is the end of the connection."""
        messages: list[ToFrontend | Broken] = []
        for frame in frames:
            try:
                message = decode_to_frontend(frame)
                if self.address.is_remote:
                    message = moved_to_frontend(message, time.monotonic())
                messages.append(message)
            except Exception as error:
                messages.append(Broken(f"a message of the engine core could not be read: {error}"))
                break
        return messages

    def gone_fileno(self) -> int:
        """Return a descriptor that is readable when `core_is_gone` may have changed."""
        return self._gone.fileno()

    def core_is_gone(self) -> bool:
        """Return whether the core's process has left since the last call."""
        return self._is_ours and self._gone.has_ended()

    @property
    def num_refused(self) -> int:
        """Strangers that have been refused at its ports."""
        return self._gone.num_refused

    def leave_to_parent(self) -> None:
        """Close a forked process's copies of the connections.

        With them open, the core would not see this frontend's end.
        """
        self._is_ours = False
        close_sockets_of(self.address.bound)

    def close(self) -> None:
        """Close the sockets. May be called twice. A forked child closes nothing of its parent's."""
        if not self._is_ours or self._context.closed:
            return
        remove_address(self.address)
        self._gone.close()
        self._context.destroy(linger=0)


class CoreChannel:
    """The core's end of all its frontends' channels. Only the busy loop's thread uses it."""

    def __init__(self, clients: Sequence[ClientAddress]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The selector is one descriptor for all: epoll, or what the system has instead.
        self._selector = selectors.DefaultSelector()
        # A socket for each frontend: who sent a message is known, whatever the message says.
        self._in: dict[int, zmq.Socket[bytes]] = {}
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._gone: dict[int, EndWatch] = {}
        self._remote: set[int] = set()
        """The frontends on other hosts, whose clocks differ."""
        self._num_clients = 0
        for client in clients:
            self.connect(client)

    def connect(self, address: ClientAddress) -> int:
        """Serve another frontend, which may begin to listen later, and return its number.

        This and `take_gone` may use up the descriptor's news of a message, so `receive` must follow
        before a wait. Raises zmq.ZMQError for an address that is none.
        """
        client = self._num_clients
        into, out = _open(self._context, zmq.PULL), _open(self._context, zmq.PUSH)
        watch = _watch(out, is_remote=address.is_remote)
        try:
            if address.server_key is not None:
                curve.connect(into, address.server_key)
                curve.connect(out, address.server_key)
            into.connect(address.to_core)
            out.connect(address.from_core)
        except (zmq.ZMQError, TypeError, ValueError):
            watch.close()
            for socket in (out, into):
                socket.close(linger=0)
            raise
        self._num_clients += 1
        self._in[client], self._out[client], self._gone[client] = into, out, watch
        if address.is_remote:
            self._remote.add(client)
        for descriptor in (int(into.getsockopt(zmq.FD)), watch.fileno()):
            self._selector.register(descriptor, selectors.EVENT_READ)
        return client

    def take_gone(self) -> list[int]:
        """Return the frontends whose processes have left since the last call.

        Nothing more is sent to them.
        """
        gone = [client for client, watch in self._gone.items() if watch.has_ended()]
        for client in gone:
            into, watch = self._in.pop(client), self._gone.pop(client)
            for descriptor in (int(into.getsockopt(zmq.FD)), watch.fileno()):
                self._selector.unregister(descriptor)
            watch.close()
            for socket in (self._out.pop(client), into):
                socket.close(linger=0)
        return gone

    def receive(self) -> list[ToCore | Refused]:
        """Return all messages that have arrived, those of each frontend in order.

        One that cannot be read is returned as what its envelope says. One without an envelope can
        be answered to nobody: it is logged and dropped.
        """
        messages: list[ToCore | Refused] = []
        for client, socket in self._in.items():
            for frame in _drain(socket):
                try:
                    message = open_sealed(client, frame)
                    if client in self._remote and not isinstance(message, Refused):
                        message = moved_to_core(message, time.monotonic())
                    messages.append(message)
                except ValueError as error:
                    logger.warning(
                        "dropped a message of frontend %d with %d bytes: %s",
                        client,
                        len(frame),
                        error,
                    )
        return messages

    def send(self, client: int, message: ToFrontend) -> None:
        """Queue a message for one frontend, without waiting. Do nothing if it has left."""
        if (out := self._out.get(client)) is not None:
            if client in self._remote:
                message = moved_to_frontend(message, -time.monotonic())
            out.send(encode(message))

    def broadcast(self, message: ToFrontend) -> None:
        """Queue a message for every frontend."""
        for client in self._out:
            self.send(client, message)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` or `take_gone` may have something."""
        return int(self._selector.fileno())

    def close(self) -> None:
        """Deliver what is queued, for a second at most, then close."""
        self._selector.close()
        while self._gone:
            self._gone.popitem()[1].close()
        self._context.destroy(linger=_LINGER_MS)
