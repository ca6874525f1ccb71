"""Two hosts for the ranks of a replica, for which two loopback addresses stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sidestep.frontend.placement import local
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import Child, spawn
from sidestep.ipc.processes.rank_hosts import RankHost, RelayDoor, start_relay

HERE, THERE = "127.0.0.1", "127.0.0.2"


class TwoHosts:
    """Has each core that this process starts leave its last ranks to host "there"."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Begin to do so. The first ranks of each core are those of host "here"."""
        self.relays: list[Child] = []
        """The relays of all starts, the last start's at the end."""
        self.doors: list[RelayDoor] = []
        self.first_there = 1
        """The first rank of the other host."""
        self.changes: dict[str, Any] = {}
        """Fields of the other host that tests change."""
        patch.setattr(local, "spawn", self._spawn)

    def _spawn(self, name: str, target: str, args: CoreArgs, **options: Any) -> Child:
        relay, door = start_relay(THERE)
        self.relays.append(relay)
        self.doors.append(door)
        num_ranks = args.config.parallel.num_ranks
        here = RankHost("here", HERE, 0, self.first_there)
        there = RankHost("there", THERE, self.first_there, num_ranks - self.first_there, relay=door)
        hosts = (here, replace(there, **self.changes))
        return spawn(name, target, replace(args, rank_hosts=hosts), **options)

    def close(self) -> None:
        """End all relays."""
        for relay in self.relays:
            relay.stop()
