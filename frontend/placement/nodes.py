"""The hosts that have joined, and the choice of a host for a core. Nothing here has a socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.hosts.node_messages import Hello
from sidestep.ipc.transport.clocks import ClockOffset


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
    cores: dict[int, RemoteCore] = field(default_factory=dict)
    """The cores that it has, by number."""
    gpus_of: dict[int, list[str]] = field(default_factory=dict)
    """By core: the GPUs that it has."""

    @property
    def free_gpus(self) -> list[str]:
        """The GPUs that no core has."""
        taken = {gpu for gpus in self.gpus_of.values() for gpu in gpus}
        return [gpu for gpu in self.hello.gpus if gpu not in taken]

    def has_room(self, core: RemoteCore) -> bool:
        """Return whether a core can start here."""
        if core.hosts is not None and self.name not in core.hosts:
            return False
        if len(self.cores) >= self.hello.max_replicas:
            return False
        return len(self.free_gpus) >= self._num_gpus(core)

    def take(self, core: RemoteCore) -> list[str] | None:
        """Give a core its room, and return its GPUs; None if it needs none."""
        count = self._num_gpus(core)
        self.cores[core.number] = core
        self.gpus_of[core.number] = self.free_gpus[:count]
        return self.gpus_of[core.number] if count else None

    def forget(self, number: int) -> RemoteCore | None:
        """Take back the room of a core that has ended, and return the core."""
        self.gpus_of.pop(number, None)
        return self.cores.pop(number, None)

    def _num_gpus(self, core: RemoteCore) -> int:
        parallel = core.args.config.parallel
        wants = parallel.device == "cuda" or (parallel.device == "auto" and self.hello.gpus)
        return parallel.num_ranks if wants else 0


def choose_node(nodes: Iterable[Node], core: RemoteCore) -> Node | None:
    """Return the host for a core: the one with the fewest cores of those with room.

    The first to join comes before equals. None if no host has room.
    """
    fitting = [node for node in nodes if node.has_room(core)]
    return min(fitting, key=lambda node: len(node.cores), default=None)


def unused_name(nodes: Iterable[Node], name: str) -> str:
    """Return a name that no host has: this one, or it with a number."""
    taken = {node.name for node in nodes}
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
