"""The ranks of a replica on one host, as the executor uses them: one interface for all hosts."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sidestep.executor.processes.worker_orders import Order
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.cpu_use import CpuTime


@dataclass(frozen=True, kw_only=True)
class RanksJob:
    """The ranks that one host runs of a replica."""

    config: EngineConfig
    first_rank: int
    num_ranks: int
    replica: int
    start: int
    """Number of times that the replica has been started before."""
    after: tuple[int, ...] = ()
    """Processes of the last start, for whose end the ranks wait."""
    first_gpu: int | None = None
    """Index of the first rank's GPU on its host; None where the replicas share a host's GPUs."""
    host: str | None = None
    """Name of the host, where the replica has several."""
    address: str | None = None
    """The host's IP address for the replica's other hosts, if there are any."""

    @property
    def ranks(self) -> range:
        """The ranks of this host, within the replica."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def place(self) -> str:
        """The words that follow the name of a rank in texts for users."""
        return "" if self.host is None else f" on host {self.host}"

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for users, with that of its host."""
        return f"{self.config.parallel.rank_name(rank)}{self.place}"

    def worker_args(self, rank: int) -> WorkerArgs:
        """Return the arguments of one rank, as far as they are known before `launch`."""
        gpu = None if self.first_gpu is None else self.first_gpu + rank - self.first_rank
        return WorkerArgs.of(
            self.config,
            rank=rank,
            replica=self.replica,
            start=self.start,
            after=self.after,
            gpu=gpu,
        )


@dataclass(frozen=True, kw_only=True)
class RelayJob:
    """The ranks that a relay starts; sent to it as JSON."""

    job: RanksJob
    rendezvous: str | None
    """Where they meet the replica's other ranks, as in `Meeting`."""
    beat_s: float
    """Seconds between two reports of the relay."""


class Meeting(NamedTuple):
    """Where the ranks of a replica find one another while they start."""

    rendezvous: str | None = None
    """A file's path, or tcp://address:port; None for ranks that need not meet."""
    folder: str | None = None
    """A folder of this host that is removed when they have met."""
    listener: int | None = None
    """Descriptor of the listening socket of a tcp address, for rank 0."""


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

    def __init__(self, job: RanksJob) -> None:
        self.job = job
        self.ranks = job.ranks
        self.clock_ahead_ns = 0
        """Nanoseconds by which the host's monotonic clock is ahead of this process's."""
        self.num_refused = 0
        """Connections of strangers that the host's relay has refused."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ranks})"

    @abc.abstractmethod
    def what_devices_need(self) -> str | None:
        """Return what their GPUs need before they can be used again; None if nothing is known."""

    @abc.abstractmethod
    def launch(self, meeting: Meeting) -> None:
        """Begin to start them, and return at once."""

    @abc.abstractmethod
    def send(self, parts: Sequence[bytes | memoryview], kind: Order) -> None:
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
    def cpu_time(self) -> CpuTime | None:
        """Return the CPU time that they have used; None if it is not known, or one is gone."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill them, however they hang, and do not wait for their end."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Tell them to end, and do not wait for it."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End them, by force if need be."""
