"""The placer `ray`, which starts cores on the nodes of a Ray cluster.

Ray decides on which node a replica runs, and holds its resources. On that node an actor runs the
same agent as `sidestep node`, which joins the head with the invitation in the actor's arguments.
From then on all is as with the placer `join`: the engine's own heartbeats tell who lives, and
tokens, steps and blocks never pass through Ray.
"""

from __future__ import annotations

import threading

from sidestep.frontend.placement.head import Head
from sidestep.frontend.placement.join import JoinPlacer, numeric_host
from sidestep.frontend.placement.on_ray.bundles import ranks_by_host
from sidestep.frontend.placement.on_ray.cluster import RayCluster, import_ray
from sidestep.frontend.placement.on_ray.rooms import Rooms
from sidestep.frontend.placement.placer import PlacedCore
from sidestep.frontend.placement.remote_core import RemoteCore
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.hosts.node_messages import NodeInvitation
from sidestep.ipc.processes.core_args import CoreArgs


class RayPlacer(JoinPlacer):
    """Has Ray choose the hosts, and gives cores to the agents there."""

    def __init__(self, config: EngineConfig) -> None:
        """Use no cluster yet."""
        super().__init__(config)
        self._cluster: RayCluster | None = None
        self._rooms: Rooms | None = None
        self._num_hosts = len(ranks_by_host(config))
        self._lock = threading.Lock()
        self._waiting: dict[int, RemoteCore] = {}
        """By replica: the core that was placed last, until its host has joined."""
        self._last: dict[int, RemoteCore] = {}
        """By replica: the core that was placed last."""
        self._replicas: dict[str, int] = {}
        """By the name of an agent: its replica."""

    def begin(self) -> None:
        """Join or start a Ray cluster. Room is asked for when cores are placed."""
        self._cluster = RayCluster(self.config.ray)
        try:
            super().begin()
            self._rooms = Rooms(
                self._cluster,
                self.config,
                self.head.invitation.encode(),
                self.agent_names,
                self._on_failure,
            )
        except BaseException:
            self.close()
            raise

    def make_head(self, host: str, port: int) -> Head:
        """Return the head, which tells of agents that have joined and of those that are missing."""
        return Head(
            host,
            port,
            self.config.placement.placer_timeout,
            on_joined=self._on_joined,
            on_missing=lambda core: self.rooms.need(core.args.replica),
        )

    @property
    def rooms(self) -> Rooms:
        """The room of the replicas."""
        assert self._rooms is not None, "begin() comes first"
        return self._rooms

    def listening(self) -> tuple[str, int]:
        """Return the numeric address and the port of this machine at which others reach it.

        The default is this machine's address as a node of Ray. Raises EngineStartError.
        """
        if self.config.placement.head_address is not None:
            return super().listening()
        return numeric_host(import_ray().util.get_node_ip_address()), 0

    def publish(self, invitation: NodeInvitation) -> None:
        """Write no file: actors get the invitation in their arguments."""

    def agent_names(self, replica: int) -> list[str]:
        """Return the names of a replica's agents, in the order of its ranks."""
        if self._num_hosts == 1:
            return [f"replica{replica}"]
        return [f"replica{replica}-{index}" for index in range(self._num_hosts)]

    def place(self, args: CoreArgs) -> PlacedCore:
        """Start a core on its replica's node, as soon as Ray has given one."""
        names = self.agent_names(args.replica)
        with self._lock:
            self._replicas |= dict.fromkeys(names, args.replica)
            core = self.head.place(args, names)
            core.on_left(lambda: self._left(core))
            self._waiting[args.replica] = self._last[args.replica] = core
        return core

    def close(self) -> None:
        """Let all agents go, and give everything back to Ray."""
        super().close()
        if self._rooms is not None:
            self._rooms.close()
        if self._cluster is not None:
            self._cluster.close()

    def _on_joined(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None:
            with self._lock:
                self._waiting.pop(replica, None)
            self.rooms.joined(replica, name)

    def _left(self, core: RemoteCore) -> None:
        """Give the room of a replica back that has left the engine, and gets no other core."""
        with self._lock:
            is_last = self._last.get(core.args.replica) is core
        if is_last and self._rooms is not None:
            self._rooms.release(core.args.replica)

    def _on_failure(self, replica: int, cause: str) -> None:
        """Fail the engine's start. Later, the room is asked for again."""
        with self._lock:
            core = self._waiting.get(replica)
        if core is not None and core.args.again is None:
            self.head.give_up(core, f"Ray could not start its host: {cause}")
