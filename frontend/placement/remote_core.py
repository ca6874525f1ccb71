"""A core on another host, as the head has it.

The head's thread reports what becomes of the core; other threads wait for it and give orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from sidestep.frontend.placement.placer import PlacedCore
from sidestep.ipc.hosts.node_messages import EndCore, WatchWorkers
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.forking import Home
from sidestep.ipc.transport.black_box import Recorded

_STOP_S = 3.0
"""Seconds for the end of a core, by its lifeline first, then by a kill."""


class Orders(Protocol):
    """The part of the head that a core uses. Any thread may call it."""

    def order(self, core: RemoteCore, message: EndCore | WatchWorkers) -> None:
        """Send an order to the host that has the core; a core that waits for a host ends."""

    def look_at(self, core: RemoteCore) -> None:
        """See whether a core whose connection has ended is still there."""


class RemoteCore(PlacedCore):
    """A core that an agent starts, or that waits for a host."""

    def __init__(
        self, orders: Orders, number: int, args: CoreArgs, hosts: Sequence[str] | None = None
    ) -> None:
        """Wait for a host. hosts: the names of those that may have it; None for any."""
        self.number, self.args, self.hosts = number, args, hosts
        self._orders = orders
        self._host: str | None = None
        self._cause = "the engine core waits for a host"
        self._notes: Recorded | None = None
        self._end_is_of_host = False
        self._is_stopping = False
        self._is_watched = False
        self._has_computed = False
        self._callbacks: list[Callable[[str], None]] = []
        self._left: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._home = Home()

    def __repr__(self) -> str:
        state = self._cause if self._ended.is_set() else self._host or "waiting"
        return f"RemoteCore({self.number}, replica={self.args.replica}, {state})"

    @property
    def num_ranks(self) -> int:
        """Number of its ranks, on all hosts together."""
        return self.args.config.parallel.num_ranks

    # Reports of the head's thread.

    def went_to(self, hosts: Sequence[str]) -> None:
        """Take note of the hosts that start it and its ranks, its own host first."""
        self._host = ", ".join(hosts)
        self._cause = f"the engine core on host {hosts[0]} is still running"

    def computed(self) -> None:
        """Take note that its workers have computed on a CPU."""
        self._has_computed = True

    def ended(self, cause: str, *, of_host: bool, notes: Recorded | None = None) -> None:
        """Take note of its end. Nothing happens if that is known."""
        with self._lock:
            if self._ended.is_set():
                return
            self._cause, self._end_is_of_host, self._notes = cause, of_host, notes
            self._ended.set()
            callbacks = [] if self._is_stopping else self._callbacks
            left = self._left if self._is_stopping else []
        for each in left:
            each()
        for callback in callbacks:
            callback(cause)

    def on_left(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when it ends because it was let go. Set before it can end."""
        self._left.append(callback)

    # The part that its frontend uses.

    @property
    def host(self) -> str | None:
        """The name of the host that has it; None while it waits for one."""
        return self._host

    @property
    def end_is_of_host(self) -> bool:
        """Whether it has ended because its host has gone."""
        return self._end_is_of_host

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(cause)` from the head's thread if it ends before `let_go`."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        if not self._is_stopping:
            callback(self._cause)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for its end, and return whether it has ended."""
        return self._ended.wait(timeout_s)

    def death_cause(self) -> str:
        """Return how it ended, as text for users."""
        return self._cause

    def link_ended(self) -> None:
        """Have the head look whether it, or its host, has ended."""
        self._orders.look_at(self)

    def let_go(self) -> None:
        """Tell it to end, and do not wait for it. Raises SidestepError in a forked child."""
        self._home.check()
        self._is_stopping = True
        if not self._ended.is_set():
            self._orders.order(self, EndCore(core=self.number))

    def stop(self) -> None:
        """End it, also if it hangs, and wait for its end."""
        self.let_go()
        if not self._ended.wait(_STOP_S):
            self.kill([])
            self._ended.wait(_STOP_S)

    def kill(self, worker_pids: Sequence[int]) -> None:
        """Have its agent kill its workers, then itself."""
        self._home.check()
        order = EndCore(core=self.number, kills=True, worker_pids=list(worker_pids))
        self._orders.order(self, order)

    def recorded(self) -> Recorded | None:
        """Return what it had noted at its end; None if its host has gone too."""
        return self._notes

    def computes(self, worker_pids: Sequence[int]) -> bool:
        """Return whether its agent has seen its workers compute since the last call."""
        if not self._is_watched:
            self._is_watched = True
            watch = WatchWorkers(core=self.number, worker_pids=list(worker_pids))
            self._orders.order(self, watch)
        has_computed, self._has_computed = self._has_computed, False
        return has_computed
