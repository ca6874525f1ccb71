"""The ranks of another host, behind its relay."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from sidestep.executor.hosts.host_ranks import HostRanks, Meeting, RanksJob, RelayJob, Said
from sidestep.executor.hosts.link import Beat, BeatTaken, CoreLink, LinkKind, Parcel
from sidestep.executor.processes.worker_orders import Order, Reply
from sidestep.ipc.processes.cpu_use import CpuTime
from sidestep.ipc.processes.rank_hosts import RankHost

_LOOK_S = 0.5
"""Seconds between two looks at whether a relay can be reached."""


class RemoteRanks(HostRanks):
    """Sends what local ranks get from the ring to a relay, and takes what the ranks say there."""

    def __init__(self, job: RanksJob, host: RankHost, beat_s: float) -> None:
        """Connect to the host's relay; start nothing yet. beat_s: seconds between its reports."""
        super().__init__(job)
        self._host = host
        self._beat_s = beat_s
        self._link = CoreLink(host)
        self._causes: dict[int, str] = {}
        """How ranks have ended."""
        self._needs: list[str | None] = []
        """The answer to a question about the devices."""
        self._cpu_time: CpuTime | None = None

    def __repr__(self) -> str:
        return f"RemoteRanks({self._host.name}, {self.ranks}, {self._link})"

    def what_devices_need(self) -> str | None:
        """Ask the relay; None if it cannot be reached, which `receive` reports."""
        self._link.send(LinkKind.ASK_DEVICES, 0, [msgspec.json.encode(self.job)])
        while not self._needs:
            if (parcel := self._link.receive()) is not None:
                self._note(parcel)
            elif self._link.lost is not None:
                return None
            else:
                self._link.wait(_LOOK_S)
        needs = self._needs.pop()
        return None if needs is None else f"{needs} (host {self._host.name})"

    def launch(self, meeting: Meeting) -> None:
        """Have the relay start the ranks."""
        job = RelayJob(job=self.job, rendezvous=meeting.rendezvous, beat_s=self._beat_s)
        if self._link.lost is None:  # else `receive` reports it
            self._link.send(LinkKind.BEGIN, 0, [msgspec.json.encode(job)])

    def send(self, parts: Sequence[bytes | memoryview], kind: Order) -> None:
        """Send a message to the relay, which writes it into the ring of its host."""
        self._link.send(kind, 0, parts)

    def filenos(self) -> list[int]:
        """Return the link's descriptors."""
        return self._link.filenos()

    def receive(self) -> Said | None:
        """Return the next message of a rank. If the host has gone, all its ranks have."""
        while (parcel := self._link.receive()) is not None:
            if parcel.kind < LinkKind.BEGIN:
                if parcel.kind == Reply.GONE:
                    self._causes[parcel.rank] = str(parcel.data, "utf-8")
                return Said(parcel.rank, parcel.kind, parcel.data)
            self._note(parcel)
        if self._link.lost is not None:
            for rank in self.ranks:
                if rank not in self._causes:
                    self._causes[rank] = self._host_cause(self._link.lost)
                    return Said(rank, Reply.GONE, b"")
        return None

    def death_cause(self, rank: int) -> str:
        """Return what the relay has said, or that it has gone."""
        return self._causes[rank]

    def pids(self) -> list[int]:
        """Return none: the ids of another host say nothing here."""
        return []

    def cpu_time(self) -> CpuTime | None:
        """Return the time that the relay has reported last."""
        return self._cpu_time

    def kill(self) -> None:
        """Have the relay kill the workers. If it cannot, they end with the link."""
        if self._link.lost is None:
            self._link.send(LinkKind.KILL, 0, [])

    def let_go(self) -> None:
        """Close the link, with which the relay and its ranks end."""
        self._link.close()

    def stop(self) -> None:
        """Do nothing more: the relay's host waits for the end of the ranks."""
        self._link.close()

    def _note(self, parcel: Parcel) -> None:
        """Take a parcel of the relay itself."""
        if parcel.kind == LinkKind.DEVICES:
            self._needs.append(msgspec.json.decode(parcel.data, type=str | None))
        elif parcel.kind == LinkKind.BEAT:
            beat = msgspec.json.decode(parcel.data, type=Beat)
            self.clock_ahead_ns, self.num_refused = beat.ahead_ns, beat.num_refused
            known = beat.cpu_seconds
            self._cpu_time = None if known is None else CpuTime(known, beat.is_halted)
            taken = BeatTaken(sent_ns=beat.sent_ns, taken_ns=time.monotonic_ns())
            if self._link.lost is None:
                self._link.send(LinkKind.BEAT_TAKEN, 0, [msgspec.json.encode(taken)])

    def _host_cause(self, lost: str) -> str:
        names = ", ".join(map(self.job.config.parallel.rank_name, self.ranks))
        return f"host {self._host.name} with {names} has gone: {lost}"
