"""The agent of a host (`sidestep node`), which starts cores by a head's orders and ends with it.

It decides nothing and keeps nothing. Its connection to the head is the lifeline of all that it has
started: when the head has gone, the cores end. When the agent ends, however it ends, they end by
their own lifelines. It counts its own turns and not seconds, as the head does.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from sidestep.frontend.placement.node.children import Children
from sidestep.frontend.placement.node.node_args import NodeArgs
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.config import available_cores
from sidestep.ipc.hosts.node_messages import (
    BEAT_S,
    MOST_MISSES,
    FromNode,
    HeadBeat,
    Hello,
    Leave,
    NodeBeat,
    ToNode,
    decode_to_node,
    encode_node_message,
    own_version,
)
from sidestep.ipc.processes.addresses import tcp_address
from sidestep.ipc.processes.process import decode_args
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.curve import PeerWatch

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
_MOST_REFUSALS = 3
"""Connections that may end before the handshake is done; after that the invitation is wrong."""


class Agent:
    """The agent of one host. `run` is its loop, and the only thread that uses the socket."""

    def __init__(self, args: NodeArgs) -> None:
        """Connect to the head, which may begin to listen later."""
        self._args = args
        host, port = host_and_port(args.invitation.head)
        self._address = args.address or _address_on_way_to(host, port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._watch = PeerWatch(self._socket)
        curve.connect(self._socket, args.invitation.server_key)
        self._socket.connect(tcp_address(host, port))
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions that other threads want to have called."""
        self._children = Children(self._address, self._tell, self._post)
        self._is_joined = False
        self._misses = 0
        self._refusals = 0
        self._next_beat = time.monotonic() + BEAT_S
        self._give_up_at = time.monotonic() + args.wait_s
        self._end: tuple[int, str] | None = None
        """The exit status and its reason, once that is known."""

    def __repr__(self) -> str:
        return f"Agent({self._args.name}, {self._children!r})"

    def run(self) -> int:
        """Serve the head until it ends, and return the exit status."""
        self._tell(
            Hello(
                name=self._args.name,
                address=self._address,
                version=own_version(),
                boot=_this_boot(),
                num_cores=available_cores(),
                gpus=list(self._args.gpus),
                max_replicas=self._args.max_replicas,
                max_ranks=self._args.max_ranks,
            )
        )
        poller = zmq.Poller()
        for each in (self._socket, self._bell, self._watch):
            poller.register(each, zmq.POLLIN)
        try:
            while self._end is None:
                left_s = max(0.0, self._next_beat - time.monotonic())
                poller.poll(int(left_s * 1000) + 1)
                self._turn()
        finally:
            self._close()
        status, reason = self._end
        logger.log(logging.ERROR if status else logging.WARNING, "%s; this node ends", reason)
        return status

    def _turn(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._hear(self._socket.recv(zmq.NOBLOCK))
        self._look_at_connection()
        while not self._posted.empty():
            self._posted.get()()
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._count_beat()

    def _look_at_connection(self) -> None:
        news = self._watch.take()
        self._refusals += news.refused
        if news.joined and not self._is_joined:
            self._is_joined = True
            logger.warning("joined %s as %s", self._args.invitation.head, self._args.name)
        if self._end is not None:
            return
        if news.left:
            self._end = 1, f"the head at {self._args.invitation.head} has gone"
        elif not self._is_joined and self._refusals >= _MOST_REFUSALS:
            self._end = 1, f"{self._args.invitation.head} does not take this invitation"

    def _count_beat(self) -> None:
        self._misses += self._is_joined
        if self._end is not None:
            return
        head = self._args.invitation.head
        if self._misses > MOST_MISSES:
            self._end = 1, f"the head at {head} has gone: no heartbeat"
        elif not self._is_joined and time.monotonic() > self._give_up_at:
            self._end = 1, f"nobody has answered at {head} for {self._args.wait_s:g} s"

    def _tell(self, message: FromNode) -> None:
        self._socket.send(encode_node_message(message))

    # Orders.

    def _hear(self, data: bytes) -> None:
        self._misses = 0
        try:
            message: ToNode = decode_to_node(data)
        except ValueError as error:
            self._end = 1, f"a message of the head cannot be read: {error}"
            return
        if isinstance(message, HeadBeat):
            now, computing = time.monotonic_ns(), self._children.computing()
            self._tell(NodeBeat(sent_ns=message.sent_ns, now_ns=now, computing=computing))
        elif isinstance(message, Leave):
            self._end = int(message.is_error), message.reason
        else:
            self._children.obey(message)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the loop call a function. Any thread may call this."""
        self._posted.put(work)
        with suppress(OSError):  # the buffer is full, so the loop wakes anyway; or it has ended
            self._ring.send(b"x")

    def _close(self) -> None:
        """End all that has been started."""
        self._children.close()
        self._watch.close()
        self._context.destroy(linger=_LINGER_MS)
        self._bell.close()
        self._ring.close()


def main(raw: bytes) -> None:
    """Run an agent as a child process: its parent's end ends it too."""
    raise SystemExit(Agent(decode_args(raw, NodeArgs)).run())


def _address_on_way_to(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((host, port or 1))  # sends nothing
        return str(way.getsockname()[0])


def _this_boot() -> str:
    """Return text that tells this start of the machine, and these process ids, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
