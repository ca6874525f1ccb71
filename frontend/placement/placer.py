"""Placers start engine cores, on this machine or on others, and watch them.

A frontend asks its placer for a core. It gets a PlacedCore, by which it hears of the core's end and
ends the core, wherever that runs. A placer schedules nothing and knows no request.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.transport.black_box import Recorded


class HostStatus(NamedTuple):
    """A host and what runs there, for people."""

    name: str
    address: str
    """The address by which others reach it."""
    replicas: tuple[int, ...]
    """The replicas whose cores run there."""


class PlacedCore(abc.ABC):
    """A core's process, wherever it runs."""

    @property
    @abc.abstractmethod
    def host(self) -> str | None:
        """The name of the host that runs it; None for this machine, or while it waits for one."""

    @property
    @abc.abstractmethod
    def end_is_of_host(self) -> bool:
        """Whether it has ended because its host has gone."""

    @abc.abstractmethod
    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(cause)` from another thread if the core ends before `let_go`.

        Call it at once if the core has ended already.
        """

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the core to end, and return whether it has."""

    @abc.abstractmethod
    def death_cause(self) -> str:
        """Return how it ended, as text for users."""

    @abc.abstractmethod
    def link_ended(self) -> None:
        """Take note that the connection to the core has ended: it may have, or its host."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Tell the core to end, and do not wait for it."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the core, also one that hangs, and wait for its end. May be called twice."""

    @abc.abstractmethod
    def kill(self, worker_pids: Sequence[int]) -> None:
        """Kill the core after its workers, which it cannot end when it hangs.

        worker_pids: the process ids of its workers, on their hosts.
        """

    @abc.abstractmethod
    def recorded(self) -> Recorded | None:
        """Return what the core has noted, also after its death; None if that is lost.

        Times are of this machine's monotonic clock.
        """

    @abc.abstractmethod
    def computes(self, worker_pids: Sequence[int]) -> bool:
        """Return whether its workers have computed on a CPU since the last call.

        worker_pids: their process ids, which stay the same.
        """


class Placer(abc.ABC):
    """Starts the cores of one engine. Any thread may call the methods."""

    def __init__(self, config: EngineConfig) -> None:
        """Start nothing yet.

        A frontend that joins an engine has one too, and uses `new_address` alone.
        """
        self.config = config

    @abc.abstractmethod
    def begin(self) -> None:
        """Prepare to place cores. Raises EngineStartError if that cannot be."""

    @abc.abstractmethod
    def new_address(self) -> ClientAddress:
        """Return an address at which a frontend on this machine can listen for a core.

        `remove_address` frees it. Raises EngineStartError if none can be had.
        """

    @abc.abstractmethod
    def place(self, args: CoreArgs) -> PlacedCore:
        """Start a core and return at once; the core may have to wait for a host.

        args: its arguments, with addresses of `new_address`. Raises OSError if no process can be
        had.
        """

    @property
    @abc.abstractmethod
    def hosts(self) -> list[HostStatus]:
        """The hosts that it uses now besides this machine."""

    @property
    @abc.abstractmethod
    def num_refused(self) -> int:
        """Peers without a key that have been refused where it listens."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what `begin` has prepared. Cores end by their own `stop`. May be called twice."""
