"""Replicas that join and leave a running engine, as its load asks; see scaling/keeper.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidestep.frontend.replicas.core_questions import CoreQuestions
from sidestep.frontend.replicas.dispatcher import Dispatcher
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.guests import Guests
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.replicas.replica_status import ReplicaStatus
from sidestep.frontend.replicas.scaling.keeper import GuestKeeper, Keeper, OwnKeeper
from sidestep.frontend.replicas.supervisor import OwnSupervisor, Supervisor
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.transport.messages import Ready
from sidestep.ipc.transport.owner_line import Leaving, Loaded

_JOINS = "it has just been added"


class Membership(CoreQuestions):
    """The part of ReplicaSet that changes the number of replicas."""

    _config: EngineConfig
    _loop: asyncio.AbstractEventLoop | None
    _ready: dict[int, Ready]
    _retired: list[EngineClient]
    _leaving: set[int]
    """Replicas that serve, get no new requests, and are to leave."""
    _keeper: Keeper | None
    _dispatcher: Dispatcher | None
    _supervisor: Supervisor
    _guests: Guests
    counts: RecoveryCounts

    def _make_keeper(self, tell: Callable[[Loaded], None] | None) -> Keeper | None:
        """Return what looks at the load. tell: tells the owner, in a frontend that has joined."""
        if self._config.parallel.max_replicas is None:
            return None
        return OwnKeeper(self._config, self) if tell is None else GuestKeeper(self, tell)

    def look_at_load(self) -> None:
        """Have the keeper of the number of replicas look at the load, if there is one."""
        if self._keeper is not None and self._loop is not None and not self._closed:
            self._keeper.wake(self._loop)

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The status of each replica."""
        stalled = self._watch.stalled
        return [
            ReplicaStatus(
                replica,
                self._ready.get(replica),
                self._dead.get(replica),
                stalled.get(replica),
                self._restarting.get(replica),
            )
            for replica in range(self._size)
            if replica not in self._absent | self.joining
        ]

    @property
    def ready(self) -> list[Ready]:
        """The first message of each replica that has started."""
        return list(self._ready.values())

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output that every replica takes, in tokens."""
        return min(ready.max_model_len for ready in self._ready.values())

    @property
    def num_serving(self) -> int:
        """Number of replicas that serve and do not leave."""
        return len(self._alive) - len(self._leaving)

    @property
    def places(self) -> int:
        """Number of sequences that a replica runs at once."""
        ready = next(iter(self._ready.values()))
        return self._config.limits(ready.device_type).max_num_seqs

    @property
    def is_steady(self) -> bool:
        """Whether no replica starts and no suspects of a death run in probation."""
        return not (self._restarting or self._requests.has_suspects)

    @property
    def _requests(self) -> Dispatcher:
        assert self._dispatcher is not None, "wait_ready() comes first"
        return self._dispatcher

    def load(self) -> Loaded:
        """Return the load of this frontend and of all that it has invited."""
        loads = [Loaded(self._requests.forecast_s(), len(self._requests)), *self._guests.loads]
        return Loaded(max(each.forecast_s for each in loads), sum(each.running for each in loads))

    def has_requests(self, replica: int) -> bool:
        """Return whether a replica has requests of this frontend."""
        return self._requests.has(replica)

    def leaves(self, replica: int) -> bool:
        """Return whether a replica is still to leave: it has not died meanwhile."""
        return replica in self._leaving

    # The owner's decisions.

    @property
    def can_bring(self) -> bool:
        """Whether one more replica may join: one is absent, and the engine does not sleep."""
        assert isinstance(self._supervisor, OwnSupervisor)
        return bool(self._absent) and not self._supervisor.sleeps

    def bring(self) -> None:
        """Let one more replica join."""
        assert isinstance(self._supervisor, OwnSupervisor)
        replica = min(self._absent)
        self.expect(replica)
        self.counts.joined += 1
        self._supervisor.bring(replica)

    def retire(self) -> int | None:
        """Send nothing more to one of the replicas, and return its number; None if none may go.

        It is the one with the least to do; of those that are alike, the one that has come last.
        """
        assert isinstance(self._supervisor, OwnSupervisor)
        loads = self._requests.router.loads
        if self._supervisor.sleeps or len(loads) < 2:
            return None
        replica = min(loads, key=lambda each: (loads[each], -each))
        self.hear_leaving(Leaving(replica))
        self._supervisor.retires(replica, self._ready[replica])
        return replica

    def clear_out(self, replica: int) -> None:
        """Let the requests of a replica that is to leave go on elsewhere."""
        self.hear_leaving(Leaving(replica, at_once=True))

    def dismiss(self, replica: int) -> None:
        """End a replica that has nothing to do."""
        self.counts.left += 1
        self.hear_left(replica)

    # The following is for all frontends.

    def expect(self, replica: int) -> None:
        """Take note that a replica joins, if it was absent."""
        if replica in self._absent:
            self._absent.remove(replica)
            self._restarting[replica] = _JOINS

    def hear_leaving(self, news: Leaving) -> None:
        """Send nothing more to a replica that is to leave."""
        replica = news.replica
        self._guests.tell_all(news)
        if replica not in self._alive:
            return
        if replica not in self._leaving:
            self._leaving.add(replica)
            self._requests.retire(replica)
        if news.at_once:
            self._requests.clear_out(replica)

    def hear_left(self, replica: int) -> None:
        """Do without a replica that has left."""
        self._guests.tell_left(replica)
        self._restarting.pop(replica, None)
        if replica in self._alive:
            self._alive.remove(replica)
            self._watch.forget(replica)
            self._requests.lose(replica)
        self._leaving.discard(replica)
        self._absent.add(replica)
        self._ready.pop(replica, None)
        if (client := self._clients.pop(replica, None)) is not None:
            client.fail_calls(EngineDeadError(self.named(replica, "it has left the engine")))
            client.retire()
            self._retired = [each for each in self._retired if not each.has_ended]
            self._retired.append(client)

    @property
    def joining(self) -> set[int]:
        """The replicas that have been added and do not serve yet."""
        return {replica for replica, cause in self._restarting.items() if cause == _JOINS}
