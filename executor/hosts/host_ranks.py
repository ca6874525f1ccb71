"""The ranks of a replica on one host, as the executor uses them: one interface for all hosts."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sidestep.executor.processes.worker import Order
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class RanksJob:
    """The ranks that one host runs of a replica, and how they begin."""

    config: EngineConfig
    first_rank: int
    num_ranks: int
    replica: int
    start: int
    """Number of times that the replica has been started before."""

    @property
    def ranks(self) -> range:
        """The ranks of this host, within the replica."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def worker_args(self, rank: int) -> WorkerArgs:
        """Return the arguments of one rank, as far as they are known before `launch`."""
        return WorkerArgs.of(self.config, rank=rank, replica=self.replica, start=self.start)


class Meeting(NamedTuple):
    """Where the ranks of a replica find one another while they start."""

    rendezvous: str | None = None
    """A file; None with one rank."""
    folder: str | None = None
    """A folder of this host that is removed when they have met."""


class Said(NamedTuple):
    """A message of a rank."""

    rank: int
    """Within the replica."""
    kind: int
    """A Reply."""
    data: memoryview | bytes
    """Valid until the next call of `receive`."""


class HostRanks(abc.ABC):
    """Ranks that follow one another, all on one host."""

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ranks})"

    @abc.abstractmethod
    def what_devices_need(self) -> str | None:
        """Return what their GPUs need before they can be used again; None if nothing is known."""

    @abc.abstractmethod
    def launch(self, meeting: Meeting) -> None:
        """Begin to start them, and return at once."""

    @abc.abstractmethod
    def send(self, parts: Iterable[bytes | memoryview], kind: Order) -> None:
        """Send all of them a message made of byte buffers. Raises RingClosed."""

    @abc.abstractmethod
    def filenos(self) -> list[int]:
        """Return descriptors, one of which is readable when `receive` may have something."""

    @abc.abstractmethod
    def receive(self) -> Said | None:
        """Return the next message of any of them; None if there is none.

        The descriptors are silent afterwards. A rank that has ended says so itself, once, by
        Reply.GONE.
        """

    @abc.abstractmethod
    def death_cause(self, rank: int) -> str:
        """Return how a rank that is gone has ended; this may wait for a moment."""

    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Return their process ids on this host; none where they are on another host."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill them, however they hang, and do not wait for their end."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Tell them to end, and do not wait for it."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End them, by force if need be."""
