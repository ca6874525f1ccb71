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
from dataclasses import replace

import zmq

from sidestep.frontend.placement.nodes import Node, choose_node, unused_name
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
    StartCore,
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
from sidestep.ipc.transport.clocks import moved_notes
from sidestep.ipc.transport.ends import RemoteEnds

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
"""Seconds for an agent's report about a core whose connection has ended."""
_QUIET_S = 10.0
"""Seconds between two lines of the log about refused peers."""
_LINGER_MS = 1000
_END_S = 5.0


class Head:
    """Listens to agents and places cores on their hosts."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Listen. host: a numeric address; port: 0 takes a free one.

        timeout_s: seconds for which a first start waits for a host. Raises EngineStartError.
        """
        self._keys = curve.fresh_keys()
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
            self._context.destroy(linger=0)
            place = with_port(host, port)
            raise EngineStartError(f"head_address: cannot listen at {place}: {error}") from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.removeprefix("tcp://")
        self._timeout_s = timeout_s
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._nodes: dict[bytes, Node] = {}
        self._waiting: list[RemoteCore] = []
        self._boots: dict[int, str] = {}
        """By replica: the start of the machine that had it last."""
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
        self._post(lambda: self._place(core))
        return core

    def order(self, core: RemoteCore, message: EndCore | WatchWorkers) -> None:
        """Send an order to the host that has a core; a core that waits for one ends."""
        self._post(lambda: self._order(core, message))

    def look_at(self, core: RemoteCore) -> None:
        """See whether a core whose connection has ended is still there."""
        self._post(lambda: self._look_at(core))

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

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), work))

    def _end(self) -> None:
        """Let the agents go, and report the end of all cores."""
        while not self._posted.empty():
            self._posted.get()()
        for node in list(self._nodes.values()):
            self._send(node.identity, Leave(reason="the head has shut down", is_error=False))
        cores = [core for node in self._nodes.values() for core in node.cores.values()]
        for core in (*cores, *self._waiting):
            core.ended("the head of the hosts has ended", of_host=True)
        self._ends.close()
        self._context.destroy(linger=_LINGER_MS)
        self._bell.close()
        self._ring.close()

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
        self._tell(node, HeadBeat(sent_ns=time.monotonic_ns()))
        self._assign()

    def _take(self, node: Node, message: FromNode) -> None:
        if isinstance(message, NodeBeat):
            node.clock.answered(message.sent_ns, message.now_ns, time.monotonic_ns())
            for number in message.computing:
                if (core := node.cores.get(number)) is not None:
                    core.computed()
        elif isinstance(message, CoreEnded):
            core = node.forget(message.core)
            notes = message.notes
            if notes is not None:
                notes = moved_notes(notes, -node.clock.ns)
            if core is not None:
                core.ended(f"{message.cause} on host {node.name}", of_host=False, notes=notes)
            self._assign()

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
        for core in list(node.cores.values()):
            core.ended(cause, of_host=True)
        self._assign()

    def _tell(self, node: Node, message: ToNode) -> None:
        if not self._send(node.identity, message):
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

    # Cores.

    def _place(self, core: RemoteCore) -> None:
        self._waiting.append(core)
        if core.args.again is None:
            self._after(self._timeout_s, lambda: self._give_up(core))
        self._assign()
        if core in self._waiting:
            ranks = core.args.config.parallel.num_ranks
            logger.warning(
                "replica %d waits for a host with room for %d ranks", core.args.replica, ranks
            )

    def _give_up(self, core: RemoteCore) -> None:
        if core in self._waiting:
            self._waiting.remove(core)
            names = ", ".join(node.name for node in self._nodes.values()) or "none"
            core.ended(
                f"no host with room for it has come in {self._timeout_s:g} s (hosts: {names})",
                of_host=False,
            )

    def _assign(self) -> None:
        """Start the cores that wait, as far as hosts have room."""
        for core in self._waiting.copy():
            node = choose_node(self._nodes.values(), core)
            if node is not None and core in self._waiting:
                self._waiting.remove(core)
                self._start(core, node)
        self.hosts = [
            HostStatus(
                node.name,
                node.hello.address,
                tuple(sorted(core.args.replica for core in node.cores.values())),
            )
            for node in self._nodes.values()
        ]

    def _start(self, core: RemoteCore, node: Node) -> None:
        gpus = node.take(core)
        core.went_to(node.name)
        args = replace(core.args, owns_visible_gpus=gpus is not None)
        if args.again is not None and self._boots.get(args.replica) != node.hello.boot:
            # The process ids of the last start mean nothing there.
            args = replace(args, again=replace(args.again, pids=()))
        self._boots[args.replica] = node.hello.boot
        logger.info("replica %d starts on host %s", args.replica, node.name)
        self._tell(node, StartCore(core=core.number, args=args, gpus=gpus))

    def _order(self, core: RemoteCore, message: EndCore | WatchWorkers) -> None:
        if core in self._waiting:
            if isinstance(message, EndCore):
                self._waiting.remove(core)
                core.ended("it was not needed any more", of_host=False)
            return
        node = self._node_of(core)
        if node is not None:
            self._tell(node, message)

    def _node_of(self, core: RemoteCore) -> Node | None:
        return next((node for node in self._nodes.values() if core.number in node.cores), None)

    def _look_at(self, core: RemoteCore) -> None:
        self._beat_all()
        if self._node_of(core) is not None:
            self._after(_REPORT_S, lambda: self._cut_off(core))

    def _cut_off(self, core: RemoteCore) -> None:
        """Give up a core that cannot be reached although its agent can."""
        node = self._node_of(core)
        if node is not None and not core.wait(0):
            self._tell(node, EndCore(core=core.number, kills=True))
            cause = f"the connection to the engine core on host {node.name} has ended"
            core.ended(cause, of_host=True)
