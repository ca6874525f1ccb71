"""The room that Ray gives to each replica: a placement group, and an actor on each node of it.

A placement group holds one replica, so that its ranks are packed and its resources come and go
together. Groups know nothing of one another, so replicas are spread by the nodes that a group must
avoid. One thread asks Ray: a frontend's event loop never waits for it. Ray restarts no actor. When
an agent has gone, by the engine's own heartbeats, its replica's room is given back as a whole and
asked for anew, wherever there is room then.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from sidestep.frontend.placement.on_ray.bundles import avoided, bundle, ranks_by_host, selector
from sidestep.frontend.placement.on_ray.cluster import NAMESPACE, RayCluster, last_line
from sidestep.frontend.placement.on_ray.host_actor import SidestepHost
from sidestep.ipc.config import EngineConfig

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Seconds for which Ray is asked at a time whether a group has its resources."""
_SOFT_S = 2.0
"""Seconds after which a replica with SPREAD takes a node that it would rather avoid."""
_SAY_S = 5.0
"""Seconds of waiting for room after which the log says so."""
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the next try after an actor could not start its agent, one try after another."""


@dataclass(eq=False)
class _Room:
    """The room that a replica has, or waits for."""

    group: Any
    avoid: frozenset[str]
    since: float
    """Time at which the replica began to wait."""
    nodes: list[str] = field(default_factory=list)
    """Ids of its nodes, in the order of the ranks; empty while the group waits for resources."""
    actors: list[Any] = field(default_factory=list)
    """An actor on each node."""
    joined: set[str] = field(default_factory=set)
    """Names of the agents that have reached the head."""

    @property
    def has_joined(self) -> bool:
        """Whether all its agents have reached the head."""
        return len(self.joined) == len(self.actors)


class Rooms:
    """The rooms of all replicas. Any thread may call the methods."""

    def __init__(
        self,
        cluster: RayCluster,
        config: EngineConfig,
        invitation: str,
        names: Callable[[int], list[str]],
        on_failure: Callable[[int, str], None],
    ) -> None:
        """Ask for nothing yet.

        invitation: the text for the agents. names: returns the names of a replica's agents by
        nodes. on_failure: called from another thread with a replica and the cause when its room is
        of no use; the next try comes later.
        """
        self._cluster = cluster
        self._config = config
        self._invitation = invitation
        self._names = names
        self._on_failure = on_failure
        self._engine = secrets.token_hex(3)
        """Text that tells this engine's actors from another's."""
        self._sizes = ranks_by_host(config)
        has_gpus = any(node.resources.get("GPU") for node in cluster.nodes())
        self.bundles = [bundle(config, size, has_gpus) for size in self._sizes]
        self._labels = dict(config.ray.ray_labels or {})
        self._rooms: dict[int, _Room] = {}
        self._due: dict[int, float] = {}
        """Replicas that want room -> time from which Ray may be asked."""
        self._released: set[int] = set()
        """Replicas whose rooms are to be given back."""
        self._failures: dict[int, int] = {}
        self._told: set[int] = set()
        """Replicas that wait, as the log says."""
        self._starts = 0
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ray placer", daemon=True)
        self._thread.start()

    def need(self, replica: int) -> None:
        """Ask for room for a replica none of whose agents is there.

        Nothing happens while its room is being asked for, or its agents are starting.
        """
        with self._change:
            room = self._rooms.get(replica)
            if replica in self._due or (room is not None and not room.has_joined):
                return
            self._due[replica] = time.monotonic()
            self._change.notify()

    def release(self, replica: int) -> None:
        """Give the room of a replica back, without another."""
        with self._change:
            self._due.pop(replica, None)
            self._released.add(replica)
            self._change.notify()

    def joined(self, replica: int, name: str) -> None:
        """Take note that an agent of a replica has joined."""
        with self._change:
            if (room := self._rooms.get(replica)) is not None:
                room.joined.add(name)
                if room.has_joined:
                    self._failures.pop(replica, None)

    def close(self) -> None:
        """Give back all rooms."""
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify()
        self._thread.join()
        for room in self._rooms.values():
            self._give_back(room)
        self._rooms.clear()

    # The thread that asks Ray.

    def _run(self) -> None:
        while True:
            with self._change:
                now = time.monotonic()
                while not (
                    self._closed or self._released or any(due <= now for due in self._due.values())
                ):
                    pause = min(self._due.values(), default=now + threading.TIMEOUT_MAX / 2) - now
                    self._change.wait(pause)
                    now = time.monotonic()
                if self._closed:
                    return
                released, self._released = self._released, set()
                wanted = sorted(replica for replica, due in self._due.items() if due <= now)
            for replica in released:
                if (room := self._rooms.pop(replica, None)) is not None:
                    self._give_back(room)
            for replica in wanted:
                try:
                    self._ask(replica)
                except Exception as error:  # Ray's own classes, and those of its connections
                    self._fail(replica, f"Ray: {last_line(error)}")

    def _ask(self, replica: int) -> None:
        """Ask once whether there is room for a replica, and use the room."""
        if not self._cluster.is_joined:
            raise RuntimeError("this program has left the cluster")
        room = self._rooms.get(replica)
        if room is not None and room.nodes:
            self._give_back(self._rooms.pop(replica))
            room = None
        avoid = self._avoided(replica, room)
        if room is None or room.avoid != avoid:
            since = time.monotonic()
            if room is not None:
                since = room.since
                self._give_back(room)
            room = self._rooms[replica] = self._new_room(replica, avoid, since)
        if room.group.wait(_LOOK_S):
            self._use(replica, room)
        else:
            self._say_waiting(replica, room)

    def _avoided(self, replica: int, room: _Room | None) -> frozenset[str]:
        spread = self._config.ray.ray_spread
        if spread == "SPREAD" and room is not None and time.monotonic() > room.since + _SOFT_S:
            return frozenset()
        taken = [
            node for other, its in self._rooms.items() if other != replica for node in its.nodes
        ]
        return avoided(spread, taken, self._cluster.nodes(), self.bundles[0])

    def _new_room(self, replica: int, avoid: frozenset[str], since: float) -> _Room:
        util = self._cluster.ray.util
        self._starts += 1
        group = util.placement_group(
            self.bundles,
            strategy="PACK",
            name=f"sidestep-{self._engine}-replica{replica}-{self._starts}",
            bundle_label_selector=[selector(self._labels, avoid)] * len(self.bundles),
        )
        return _Room(group, avoid, since)

    def _use(self, replica: int, room: _Room) -> None:
        """Start the actors of a room whose resources are reserved."""
        table = self._cluster.ray.util.placement_group_table(room.group)
        addresses = {node.id: node.address for node in self._cluster.nodes()}
        room.nodes = [table["bundles_to_node_id"][index] for index in range(len(self.bundles))]
        if not addresses.keys() >= set(room.nodes):
            raise RuntimeError("a node has gone while its actors were to start")
        self._told.discard(replica)
        for index, name in enumerate(self._names(replica)):
            room.actors.append(self._start_actor(room, index, name, addresses[room.nodes[index]]))
        with self._change:
            self._due.pop(replica, None)
        for actor in room.actors:
            ended: Future[str] = actor.wait.remote().future()
            ended.add_done_callback(lambda future: self._actor_ended(replica, room, future))

    def _start_actor(self, room: _Room, index: int, name: str, address: str) -> Any:
        ray = self._cluster.ray
        resources = dict(self.bundles[index])
        num_cpus, num_gpus = resources.pop("CPU", 0.0), resources.pop("GPU", 0.0)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return (
            ray.remote(SidestepHost)
            .options(
                name=f"sidestep-{self._engine}-{name}-{self._starts}",
                namespace=NAMESPACE,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                resources=resources,
                max_restarts=0,
                scheduling_strategy=strategy(room.group, index),
            )
            .remote(
                name,
                self._invitation,
                address,
                self._sizes[index],
                num_gpus > 0,
                asdict(self._config.logs),
            )
        )

    def _actor_ended(self, replica: int, room: _Room, future: Future[str]) -> None:
        """Try again later if an agent ends before all have joined.

        After that the engine's own heartbeats tell who lives.
        """
        with self._change:
            if self._closed or room.has_joined or self._rooms.get(replica) is not room:
                return
        error = future.exception()
        self._fail(replica, future.result() if error is None else f"Ray: {last_line(error)}")

    def _fail(self, replica: int, cause: str) -> None:
        with self._change:
            failures = self._failures.get(replica, 0)
            self._failures[replica] = failures + 1
            pause = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            self._due[replica] = time.monotonic() + pause
            self._change.notify()
        logger.error("replica %d has no host: %s", replica, cause)
        self._on_failure(replica, cause)

    def _say_waiting(self, replica: int, room: _Room) -> None:
        if replica not in self._told and time.monotonic() > room.since + _SAY_S:
            self._told.add(replica)
            logger.warning("replica %d: %s", replica, self.shortage())

    def shortage(self) -> str:
        """Return what a replica waits for, as text for users."""
        wanted = " and ".join(str(each) for each in self.bundles)
        return f"waits for a node of the Ray cluster with room for {wanted}; see `ray status`"

    def _give_back(self, room: _Room) -> None:
        ray = self._cluster.ray
        if not self._cluster.is_joined:
            return  # Ray has taken it back
        for actor in room.actors:
            with suppress(Exception):  # the connection to Ray may be gone, and the actor with it
                ray.kill(actor)
        with suppress(Exception):
            ray.util.remove_placement_group(room.group)
