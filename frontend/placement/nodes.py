"""The hosts that have joined, and the choice of hosts for a core. Nothing here has a socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.hosts.node_messages import Hello
from sidestep.ipc.transport.clocks import ClockOffset


class Room(NamedTuple):
    """A part of a host that a core has, or one of its relays."""

    core: RemoteCore
    num_ranks: int
    gpus: list[str]


@dataclass(eq=False)
class Node:
    """A host whose agent has joined."""

    identity: bytes
    """The agent's connection."""
    name: str
    hello: Hello
    misses: int = 0
    """Beats of the head since the agent's last message."""
    clock: ClockOffset = field(default_factory=ClockOffset)
    """The host's clock, against the head's."""
    rooms: dict[int, Room] = field(default_factory=dict)
    """By the number of a core or a relay: the part of the host that it has."""

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that have a part of the host."""
        return tuple(sorted({room.core.args.replica for room in self.rooms.values()}))

    @property
    def free_gpus(self) -> list[str]:
        """The GPUs that no core has."""
        taken = {gpu for room in self.rooms.values() for gpu in room.gpus}
        return [gpu for gpu in self.hello.gpus if gpu not in taken]

    def num_free(self, core: RemoteCore) -> int:
        """Return the number of ranks of a core that could start here."""
        if core.hosts is not None and self.name not in core.hosts:
            return 0
        if len(self.rooms) >= self.hello.max_replicas:
            return 0
        free = core.num_ranks
        if self.hello.max_ranks is not None:
            free = self.hello.max_ranks - sum(room.num_ranks for room in self.rooms.values())
        return min(free, len(self.free_gpus)) if self._gives_gpus(core) else free

    def take(self, number: int, core: RemoteCore, num_ranks: int) -> list[str] | None:
        """Give a core or a relay its room, and return its GPUs; None if it needs none."""
        gives = self._gives_gpus(core)
        gpus = self.free_gpus[:num_ranks] if gives else []
        self.rooms[number] = Room(core, num_ranks, gpus)
        return gpus if gives else None

    def _gives_gpus(self, core: RemoteCore) -> bool:
        device = core.args.config.parallel.device
        return device == "cuda" or (device == "auto" and bool(self.hello.gpus))


@dataclass
class Share:
    """The ranks of a core that one host has."""

    node: Node
    first_rank: int
    num_ranks: int


def choose_hosts(nodes: Iterable[Node], core: RemoteCore) -> list[Share]:
    """Return the hosts for a core, in the order of its ranks; none if there is no room.

    A host with room for all ranks is chosen, the one with the fewest cores. Else ranks are spread
    over few hosts, whole stages of a pipeline before parts of stages.
    """
    free = {node: node.num_free(core) for node in nodes}
    whole = [node for node, count in free.items() if count >= core.num_ranks]
    if whole:
        return [Share(min(whole, key=lambda node: len(node.rooms)), 0, core.num_ranks)]
    for unit in (core.args.config.parallel.tensor_parallel_size, 1):
        shares: list[Share] = []
        first = 0
        for node in sorted(free, key=lambda node: -free[node]):
            count = min(free[node] // unit * unit, core.num_ranks - first)
            if count > 0:
                shares.append(Share(node, first, count))
                first += count
        if first == core.num_ranks:
            return shares
    return []


def unused_name(nodes: Iterable[Node], name: str) -> str:
    """Return a name that no host has: this one, or it with a number."""
    taken = {node.name for node in nodes}
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
