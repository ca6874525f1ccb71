"""The head's side of the agents on other hosts: who has joined, what runs there, who has gone.

One thread owns the socket and all state. Other threads post functions to it, and wake it by a byte.
It counts its own turns and not seconds, and reads what has come before it counts: so a head that
was delayed itself gives up no host.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from sidestep.frontend.placement.cores import Cores
from sidestep.frontend.placement.nodes import Node, unused_name
from sidestep.frontend.placement.placer import HostStatus
from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.hosts.node_messages import (
    BEAT_S,
    MOST_MISSES,
    CoreEnded,
    EndCore,
    FromNode,
    HeadBeat,
    Hello,
    Leave,
    NodeBeat,
    NodeInvitation,
    RelayEnded,
    RelayStarted,
    ToNode,
    WatchWorkers,
    decode_from_node,
    encode_node_message,
    own_version,
)
from sidestep.ipc.processes.addresses import tcp_address, with_port
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.forking import close_sockets_of, keep_from_children
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.ends import RemoteEnds

logger = logging.getLogger(__name__)

_QUIET_S = 10.0
"""Seconds between two lines of the log about refused peers."""
_LINGER_MS = 1000
_END_S = 5.0


class Head:
    """Listens to agents and places cores on their hosts."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        keys: curve.CurveKeys | None = None,
        *,
        on_joined: Callable[[str], None] = lambda name: None,
        on_missing: Callable[[RemoteCore], None] = lambda core: None,
    ) -> None:
        """Listen. host: a numeric address; port: 0 takes a free one.

        timeout_s: seconds for which a first start waits for a host. keys: fresh ones by default.
        on_joined: called from the head's thread with the name of a host that joins. on_missing:
        called from there with a core that may run on certain hosts alone while one of them is
        missing, at each change of hosts. Raises EngineStartError.
        """
        self._on_joined = on_joined
        self._keys = keys or curve.fresh_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending tells who has gone
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._ends = RemoteEnds(self._socket)
        curve.listen(self._socket, self._keys)
        try:
            self._socket.bind(tcp_address(host, port))
        except zmq.ZMQError as error:
            self._ends.close()
            self._context.destroy(linger=0)
            place = with_port(host, port)
            raise EngineStartError(f"head_address: cannot listen at {place}: {error}") from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.removeprefix("tcp://")
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._nodes: dict[bytes, Node] = {}
        self._cores = Cores(self._nodes.values, self._tell, self._after, timeout_s, on_missing)
        self._refused_told = -_QUIET_S, 0
        self.hosts: list[HostStatus] = []
        """The hosts that have joined, in order; a new list at each change."""
        self._is_ours = True
        self._is_closing = False
        keep_from_children(self)
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Head({self.address}, hosts={[host.name for host in self.hosts]})"

    @property
    def invitation(self) -> NodeInvitation:
        """The invitation that agents need."""
        return NodeInvitation(head=self.address, server_key=self._keys.public)

    @property
    def num_refused(self) -> int:
        """Peers without the key that have been refused."""
        return self._ends.num_refused

    # Any thread.

    def place(self, args: CoreArgs, hosts: Sequence[str] | None = None) -> RemoteCore:
        """Start a core on a host with room, as soon as there is one.

        hosts: the names of the hosts that may have it; None for any.
        """
        core = RemoteCore(self, next(self._numbers), args, hosts)
        self._post(lambda: self._cores.place(core))
        return core

    def order(self, core: RemoteCore, message: EndCore | WatchWorkers) -> None:
        """Send an order to the host that has a core; a core that waits for one ends."""
        self._post(lambda: self._cores.order(core, message))

    def look_at(self, core: RemoteCore) -> None:
        """See whether a core whose connection has ended is still there."""
        self._post(lambda: self._look_at(core))

    def give_up(self, core: RemoteCore, cause: str) -> None:
        """End a core that waits for a host which will not come."""
        self._post(lambda: self._cores.give_up(core, cause))

    def close(self) -> None:
        """Let all agents go. May be called twice."""
        if self._is_ours and not self._is_closing:
            self._is_closing = True
            self._post(lambda: None)
            self._thread.join(_END_S)

    def leave_to_parent(self) -> None:
        """Close a forked process's copies of the sockets."""
        self._is_ours = False
        close_sockets_of({host_and_port(self.address)})
        self._bell.close()
        self._ring.close()

    def _post(self, work: Callable[[], None]) -> None:
        self._posted.put(work)
        with suppress(OSError):  # the buffer is full, so the thread wakes anyway; or it has ended
            self._ring.send(b"x")

    # The thread.

    def _run(self) -> None:
        self._after(BEAT_S, self._beat)
        poller = zmq.Poller()
        for each in (self._socket, self._bell, self._ends):
            poller.register(each, zmq.POLLIN)
        try:
            while not self._is_closing:
                left_s = max(0.0, self._timers[0][0] - time.monotonic())
                poller.poll(int(left_s * 1000) + 1)
                self._turn()
        except BaseException:
            logger.exception("the head of the hosts has failed")
        self._end()

    def _turn(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._hear(identity, frames)
        if self._ends.has_ended():
            self._beat_all()  # tells which of them has left
        self._tell_refused()
        while not self._posted.empty():
            self._posted.get()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self.hosts = [
            HostStatus(node.name, node.hello.address, node.replicas)
            for node in self._nodes.values()
        ]

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), work))

    def _end(self) -> None:
        """Let the agents go, and report the end of all cores."""
        while not self._posted.empty():
            self._posted.get()()
        for node in list(self._nodes.values()):
            self._send(node.identity, Leave(reason="the head has shut down", is_error=False))
        self._cores.end()
        self._ends.close()
        self._context.destroy(linger=_LINGER_MS)
        self._bell.close()
        self._ring.close()

    def _look_at(self, core: RemoteCore) -> None:
        self._beat_all()  # tells whether its host is there
        self._cores.look_at(core)

    # Agents.

    def _hear(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_from_node(b"".join(frames))
        except ValueError as error:
            logger.warning("a message of a host cannot be read: %s", error)
            self._dismiss(identity, f"a message cannot be read: {error}")
            return
        node = self._nodes.get(identity)
        if node is not None:
            node.misses = 0
            self._take(node, message)
        elif isinstance(message, Hello):
            self._welcome(identity, message)
        else:
            self._dismiss(identity, "the head has given this host up")

    def _dismiss(self, identity: bytes, reason: str) -> None:
        self._send(identity, Leave(reason=reason, is_error=True))
        if (node := self._nodes.get(identity)) is not None:
            self._lose(node, reason)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.version != own_version():
            reason = f"it has version {hello.version}, and the head {own_version()}"
            logger.error("host %s cannot be used: %s", hello.name, reason)
            self._dismiss(identity, reason)
            return
        name = unused_name(self._nodes.values(), hello.name)
        node = self._nodes[identity] = Node(identity, name, hello)
        gpus = f"{len(hello.gpus)} GPUs" if hello.gpus else f"{hello.num_cores} CPU cores"
        logger.warning("host %s has joined from %s with %s", name, hello.address, gpus)
        self._on_joined(name)
        self._tell(node, HeadBeat(sent_ns=time.monotonic_ns()))
        self._cores.assign()

    def _take(self, node: Node, message: FromNode) -> None:
        if isinstance(message, NodeBeat):
            node.clock.answered(message.sent_ns, message.now_ns, time.monotonic_ns())
            for number in message.computing:
                if (room := node.rooms.get(number)) is not None:
                    room.core.computed()
        elif isinstance(message, CoreEnded):
            self._cores.core_ended(node, message)
        elif isinstance(message, RelayStarted):
            self._cores.relay_started(node, message)
        elif isinstance(message, RelayEnded):
            self._cores.relay_ended(node, message)

    def _beat(self) -> None:
        self._after(BEAT_S, self._beat)
        for node in list(self._nodes.values()):
            node.misses += 1
            if node.misses > MOST_MISSES:
                limit_s = MOST_MISSES * BEAT_S
                self._lose(node, f"no heartbeat for {limit_s:g} s")
                self._send(node.identity, Leave(reason="no heartbeat has come", is_error=True))
        self._beat_all()

    def _beat_all(self) -> None:
        for node in list(self._nodes.values()):
            self._tell(node, HeadBeat(sent_ns=time.monotonic_ns()))

    def _lose(self, node: Node, reason: str) -> None:
        """Report the end of all cores of a host that has gone."""
        if self._nodes.pop(node.identity, None) is None:
            return
        cause = f"host {node.name} has gone: {reason}"
        logger.error(cause)
        self._cores.lost(node, cause)
        self._cores.assign()

    def _tell(self, node: Node, message: ToNode) -> None:
        is_there = node.identity in self._nodes
        if is_there and not self._send(node.identity, message):
            self._lose(node, "its connection has ended")

    def _send(self, identity: bytes, message: ToNode) -> bool:
        try:
            self._socket.send_multipart([identity, encode_node_message(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _tell_refused(self) -> None:
        told_at, told = self._refused_told
        count, now = self._ends.num_refused, time.monotonic()
        if count > told and now - told_at >= _QUIET_S:
            self._refused_told = now, count
            logger.warning(
                "%d peers that are not invited have been refused at %s, %d since the last notice",
                count,
                self.address,
                count - told,
            )
