"""The cores of an engine on its hosts: which wait, where each runs, and what its end frees.

Only the head's thread uses this. A core whose ranks have several hosts starts in two steps: first
the relays of the other hosts, then the core, which gets their addresses.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from sidestep.frontend.placement.nodes import Node, Share, choose_hosts
from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.hosts.node_messages import (
    CoreEnded,
    EndCore,
    EndRelay,
    RelayEnded,
    RelayStarted,
    StartCore,
    StartRelay,
    ToNode,
    WatchWorkers,
)
from sidestep.ipc.processes.rank_hosts import RankHost, RelayDoor
from sidestep.ipc.transport.clocks import moved_notes

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
"""Seconds for an agent's report about a core whose connection has ended."""


@dataclass(eq=False)
class _Placed:
    """A core that hosts have been chosen for."""

    core: RemoteCore
    shares: list[Share]
    gpus: list[str] | None
    """The GPUs of its own host; None if it needs none."""
    relays: dict[int, int] = field(default_factory=dict)
    """By the number of a relay: the index of its share."""
    doors: dict[int, RelayDoor] = field(default_factory=dict)
    """By the index of a share: where its relay listens."""
    is_ordered: bool = False
    """Whether the order to start the core has been sent."""

    @property
    def node(self) -> Node:
        """The core's own host."""
        return self.shares[0].node

    def rank_hosts(self) -> tuple[RankHost, ...]:
        """Return the hosts of the ranks, as the core gets them."""
        return tuple(
            RankHost(
                name=share.node.name,
                address=share.node.hello.address,
                first_rank=share.first_rank,
                num_ranks=share.num_ranks,
                relay=self.doors.get(index),
            )
            for index, share in enumerate(self.shares)
        )


class Cores:
    """All cores that have been asked for."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[Node]],
        tell: Callable[[Node, ToNode], None],
        after: Callable[[float, Callable[[], None]], None],
        timeout_s: float,
        on_missing: Callable[[RemoteCore], None],
    ) -> None:
        """Begin without cores.

        nodes: returns the hosts that have joined. tell: sends a message to one. after: calls a
        function after some seconds. timeout_s: seconds for which a first start waits for hosts.
        on_missing: called with a core that waits for certain hosts while one is missing.
        """
        self._on_missing = on_missing
        self._nodes, self._tell, self._after, self._timeout_s = nodes, tell, after, timeout_s
        self._waiting: list[RemoteCore] = []
        self._placed: dict[int, _Placed] = {}
        self._numbers = itertools.count(1)
        self._boots: dict[int, str] = {}
        """By replica: the start of the machine that had its core last."""

    def __repr__(self) -> str:
        return f"Cores(placed={list(self._placed.values())}, waiting={self._waiting})"

    # Orders of the frontend.

    def place(self, core: RemoteCore) -> None:
        """Start a core as soon as hosts have room."""
        self._waiting.append(core)
        if core.args.again is None:
            self._after(self._timeout_s, lambda: self._time_is_over(core))
        self.assign()
        if core in self._waiting and core.hosts is None:
            logger.warning(
                "replica %d waits for a host with room for %s",
                core.args.replica,
                "a rank" if core.num_ranks == 1 else f"{core.num_ranks} ranks",
            )

    def order(self, core: RemoteCore, message: EndCore | WatchWorkers) -> None:
        """Pass an order on to the host that has a core; one that has not begun ends."""
        placed = self._placed.get(core.number)
        if placed is not None and placed.is_ordered:
            self._tell(placed.node, message)
        elif isinstance(message, EndCore):
            self._drop(core, "it was not needed any more", of_host=False)

    def give_up(self, core: RemoteCore, cause: str) -> None:
        """End a core that waits for hosts which will not come."""
        if core in self._waiting:
            self._drop(core, cause, of_host=False)

    def look_at(self, core: RemoteCore) -> None:
        """Give a core up whose connection has ended, unless its host soon says why."""
        if core.number in self._placed:
            self._after(_REPORT_S, lambda: self._cut_off(core))

    def end(self) -> None:
        """Report the end of all: the head ends, and the agents with it."""
        for core in [placed.core for placed in self._placed.values()] + self._waiting:
            core.ended("the head of the hosts has ended", of_host=True)

    # Events of the hosts.

    def assign(self) -> None:
        """Start the cores that wait, as far as hosts have room."""
        for core in self._waiting.copy():
            shares = choose_hosts(self._nodes(), core)
            if shares and core in self._waiting:
                self._waiting.remove(core)
                self._start(core, shares)
        names = {node.name for node in self._nodes()}
        for core in self._waiting.copy():
            if core.hosts is not None and not names.issuperset(core.hosts):
                self._on_missing(core)

    def lost(self, node: Node, cause: str) -> None:
        """Take note that a host has gone, with all that it had."""
        for core in {room.core for room in node.rooms.values()}:
            self._drop(core, cause, of_host=True)

    def relay_started(self, node: Node, message: RelayStarted) -> None:
        """Start the core when all of its relays listen."""
        room = node.rooms.get(message.relay)
        placed = None if room is None else self._placed.get(room.core.number)
        if placed is not None and message.relay in placed.relays:
            door = RelayDoor(message.port, message.server_key)
            placed.doors[placed.relays[message.relay]] = door
            self._start_core(placed)

    def relay_ended(self, node: Node, message: RelayEnded) -> None:
        """Free what a relay had. A core that has begun sees the end of its relay itself."""
        room = node.rooms.pop(message.relay, None)
        placed = None if room is None else self._placed.get(room.core.number)
        if placed is not None and not placed.is_ordered:
            self._drop(placed.core, f"{message.cause} on host {node.name}", of_host=False)
        self.assign()

    def core_ended(self, node: Node, message: CoreEnded) -> None:
        """Report the end of a core, and free what it had."""
        room = node.rooms.pop(message.core, None)
        notes = message.notes
        if notes is not None:
            notes = moved_notes(notes, -node.clock.ns)
        if room is not None:
            room.core.ended(f"{message.cause} on host {node.name}", of_host=False, notes=notes)
            self._end_relays(self._placed.pop(message.core, None))
        self.assign()

    # Steps of these.

    def _start(self, core: RemoteCore, shares: list[Share]) -> None:
        core.went_to([share.node.name for share in shares])
        own = shares[0]
        placed = _Placed(core, shares, own.node.take(core.number, core, own.num_ranks))
        self._placed[core.number] = placed
        for index, share in enumerate(shares[1:], 1):
            number = -next(self._numbers)  # cores have the positive numbers
            placed.relays[number] = index
            gpus = share.node.take(number, core, share.num_ranks)
            self._tell(share.node, StartRelay(relay=number, gpus=gpus))
        logger.info("replica %d starts on %s", core.args.replica, core.host)
        self._start_core(placed)

    def _start_core(self, placed: _Placed) -> None:
        if len(placed.doors) < len(placed.relays) or placed.core.wait(0):
            return
        args = replace(placed.core.args, rank_hosts=placed.rank_hosts())
        boot = placed.node.hello.boot
        if args.again is not None and self._boots.get(args.replica) != boot:
            # The process ids of the last start mean nothing there.
            args = replace(args, again=replace(args.again, pids=()))
        self._boots[args.replica] = boot
        placed.is_ordered = True
        self._tell(placed.node, StartCore(core=placed.core.number, args=args, gpus=placed.gpus))

    def _drop(self, core: RemoteCore, cause: str, *, of_host: bool) -> None:
        """Report the end of a core, and have its hosts end what is left of it."""
        if core in self._waiting:
            self._waiting.remove(core)
        core.ended(cause, of_host=of_host)
        placed = self._placed.pop(core.number, None)
        if placed is None:
            return
        if placed.is_ordered:
            self._tell(placed.node, EndCore(core=core.number, kills=True))
        else:
            placed.node.rooms.pop(core.number, None)
        self._end_relays(placed)

    def _end_relays(self, placed: _Placed | None) -> None:
        if placed is not None:
            for number, index in placed.relays.items():
                node = placed.shares[index].node
                if number in node.rooms:
                    self._tell(node, EndRelay(relay=number))

    def _time_is_over(self, core: RemoteCore) -> None:
        names = ", ".join(node.name for node in self._nodes()) or "none"
        limit_s = f"{self._timeout_s:g} s"
        self.give_up(core, f"no host with room for it has come in {limit_s} (hosts: {names})")

    def _cut_off(self, core: RemoteCore) -> None:
        """Give up a core that cannot be reached although its agent can."""
        if core.number in self._placed and not core.wait(0):
            cause = f"the connection to the engine core on host {core.host} has ended"
            self._drop(core, cause, of_host=True)
