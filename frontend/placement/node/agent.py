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
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import zmq

from sidestep.frontend.placement.local import LocalCore, start_core
from sidestep.frontend.placement.node.model_files import with_local_files
from sidestep.frontend.placement.node.node_args import NodeArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.config import available_cores
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
    StartCore,
    ToNode,
    WatchWorkers,
    decode_to_node,
    encode_node_message,
    own_version,
)
from sidestep.ipc.processes.addresses import tcp_address
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import decode_args
from sidestep.ipc.transport import curve
from sidestep.ipc.transport.curve import PeerWatch

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
_MOST_REFUSALS = 3
"""Connections that may end before the handshake is done; after that the invitation is wrong."""


class Agent:
    """One host's agent. `run` is its loop, and the only thread that uses the socket."""

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
        self._cores: dict[int, LocalCore] = {}
        self._watched: dict[int, Sequence[int]] = {}
        """By core: its workers whose CPU time is looked at."""
        self._reports: queue.SimpleQueue[CoreEnded | tuple[StartCore, CoreArgs]] = (
            queue.SimpleQueue()
        )
        """Ends of cores, and starts whose model is there, from other threads."""
        self._is_joined = False
        self._misses = 0
        self._refusals = 0
        self._next_beat = time.monotonic() + BEAT_S
        self._give_up_at = time.monotonic() + args.wait_s
        self._end: tuple[int, str] | None = None
        """The exit status and its reason, once that is known."""

    def __repr__(self) -> str:
        return f"Agent({self._args.name}, cores={sorted(self._cores)})"

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
        while not self._reports.empty():
            report = self._reports.get()
            if isinstance(report, CoreEnded):
                self._forget(report)
            else:
                self._start(*report)
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
            computing = [
                core for core, pids in self._watched.items() if self._cores[core].computes(pids)
            ]
            self._tell(
                NodeBeat(sent_ns=message.sent_ns, now_ns=time.monotonic_ns(), computing=computing)
            )
        elif isinstance(message, Leave):
            self._end = int(message.is_error), message.reason
        elif isinstance(message, StartCore):
            self._prepare(message)
        elif isinstance(message, EndCore):
            self._end_core(message)
        elif isinstance(message, WatchWorkers) and message.core in self._cores:
            self._watched[message.core] = message.worker_pids

    def _prepare(self, order: StartCore) -> None:
        """Find the model's files in another thread, which may fetch them, then start the core."""

        def prepare() -> None:
            try:
                config = with_local_files(order.args.config)
            except EngineStartError as error:
                self._report(CoreEnded(core=order.core, cause=str(error), now_ns=0))
                return
            self._report((order, replace(order.args, config=config)))

        threading.Thread(target=prepare, name="find model", daemon=True).start()

    def _start(self, order: StartCore, args: CoreArgs) -> None:
        env = None if order.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(order.gpus)}
        number = order.core
        try:
            core = self._cores[number] = start_core(args, env=env)
        except OSError as error:
            cause = f"the engine core cannot be started: {error}"
            self._tell(CoreEnded(core=number, cause=cause, now_ns=time.monotonic_ns()))
            return
        core.on_death(lambda cause: self._ended(number, core, cause))

    def _end_core(self, order: EndCore) -> None:
        core = self._cores.get(order.core)
        if core is None:
            return
        if order.kills:
            core.kill(order.worker_pids)
            return

        def end() -> None:
            core.stop()
            self._ended(order.core, core, core.death_cause())

        threading.Thread(target=end, name="end a core", daemon=True).start()

    def _ended(self, number: int, core: LocalCore, cause: str) -> None:
        """Report the end of a core, from the thread that has seen it."""
        notes, now = core.recorded(), time.monotonic_ns()
        self._report(CoreEnded(core=number, cause=cause, now_ns=now, notes=notes))

    def _report(self, report: CoreEnded | tuple[StartCore, CoreArgs]) -> None:
        self._reports.put(report)
        with suppress(OSError):  # the buffer is full, so the loop wakes anyway; or it has ended
            self._ring.send(b"x")

    def _forget(self, report: CoreEnded) -> None:
        self._cores.pop(report.core, None)
        self._watched.pop(report.core, None)
        self._tell(report)

    def _close(self) -> None:
        """End all cores."""
        for core in self._cores.values():
            core.let_go()
        for core in self._cores.values():
            core.stop()
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
