"""The keeper of an engine's number of replicas, in the frontend that started the engine.

It looks at the load once a second while there is something to decide, and sleeps otherwise. A
replica that is to leave gets no new requests. When it has none left, its core is ended. A frontend
that has joined tells its load to the one that has invited it.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from sidestep.frontend.replicas.scaling.scaler import Load, ScaleLimits, Scaler
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.transport.messages import Answer
from sidestep.ipc.transport.owner_line import Loaded

logger = logging.getLogger(__name__)

_TURN_S = 1.0
_PATIENCE_S = 30.0
"""Seconds that requests may go on at a replica that is to leave; then they go on elsewhere."""


class Members(Protocol):
    """The part of ReplicaSet that a keeper uses."""

    @property
    def num_serving(self) -> int:
        """Number of replicas that serve and do not leave."""

    @property
    def places(self) -> int:
        """Number of sequences that a replica runs at once."""

    @property
    def is_steady(self) -> bool:
        """Whether no replica starts and no suspects of a death run in probation."""

    def load(self) -> Loaded:
        """Return the load of this frontend and of all that it has invited."""

    @property
    def can_bring(self) -> bool:
        """Whether one more replica may join: one is absent, and the engine does not sleep."""

    def bring(self) -> None:
        """Let one more replica join."""

    def retire(self) -> int | None:
        """Send nothing more to one of the replicas, and return its number; None if none may go."""

    def clear_out(self, replica: int) -> None:
        """Let the requests of a replica that is to leave go on elsewhere."""

    def leaves(self, replica: int) -> bool:
        """Return whether a replica is still to leave: it has not died meanwhile."""

    def has_requests(self, replica: int) -> bool:
        """Return whether a replica has requests of this frontend."""

    def ask_idle(self, replica: int) -> asyncio.Future[Answer]:
        """Ask a replica whether it has nothing to do."""

    def dismiss(self, replica: int) -> None:
        """End a replica that has nothing to do."""


class Keeper(abc.ABC):
    """Looks at the load once a second, while there is need."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look, if that has not begun."""
        if self._timer is None or self._loop is not loop:
            self.stop()
            self._loop = loop
            self._timer = loop.call_later(_TURN_S, self._turn)

    def stop(self) -> None:
        """Look no more, until `wake`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        if self.look() and self._loop is not None:
            self.wake(self._loop)

    @abc.abstractmethod
    def look(self) -> bool:
        """Do what the load asks for, and return whether to look again."""


class OwnKeeper(Keeper):
    """Lets replicas join and leave."""

    def __init__(
        self,
        config: EngineConfig,
        members: Members,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the replicas that serve."""
        super().__init__()
        scaling, most = config.scaling, config.parallel.most_replicas
        self._limits = ScaleLimits(
            least=scaling.min_replicas or 1,
            most=most,
            target_s=scaling.scale_up_ttft or 1.0,
            calm_s=scaling.scale_down_after or 300.0,
        )
        self._members = members
        self._clock = clock
        self._scaler = Scaler(self._limits)
        self._leaving: _Leaving | None = None

    def look(self) -> bool:
        """Decide once."""
        members, now = self._members, self._clock()
        load = members.load()
        if self._leaving is not None:
            if self._leaving.look(now):
                self._leaving = None
        elif members.is_steady:
            self._decide(Load(load.forecast_s, load.running, members.places), now)
        excess = members.num_serving - self._limits.least
        return (
            self._leaving is not None
            or load.running > 0
            or not members.is_steady
            or excess > 0
            or (excess < 0 and members.can_bring)
        )

    def _decide(self, load: Load, now: float) -> None:
        change = self._scaler.decide(load, self._members.num_serving, now)
        if change > 0 and self._members.can_bring:
            logger.warning("a replica joins: a first token would take %.1f s", load.forecast_s)
            self._members.bring()
        elif change < 0 and (replica := self._members.retire()) is not None:
            logger.warning("replica %d leaves: the load does not need it", replica)
            self._leaving = _Leaving(self._members, replica, now)


class _Leaving:
    """A replica that is to leave."""

    def __init__(self, members: Members, replica: int, now: float) -> None:
        self._members = members
        self._replica = replica
        self._until = now + _PATIENCE_S
        self._asked: asyncio.Future[Answer] | None = None

    def look(self, now: float) -> bool:
        """Return whether it is over. The core is asked first when all frontends have heard of it.

        The first look comes a second after they have been told.
        """
        members, replica = self._members, self._replica
        if not members.leaves(replica):
            return True  # it has died, and is being started again
        if now >= self._until:
            members.clear_out(replica)
            self._until = now + _PATIENCE_S
        if members.has_requests(replica):
            return False
        answer, self._asked = self._asked, None
        if answer is None:
            self._asked = members.ask_idle(replica)
            return False
        if not answer.done():
            self._asked = answer
            return False
        if answer.cancelled() or answer.exception() is not None:
            return False  # it has died: the next look will see
        if not (answer.result().result or {})["idle"]:
            return False
        members.dismiss(replica)
        return True


class GuestKeeper(Keeper):
    """Tells the load of a frontend that has joined."""

    def __init__(self, members: Members, tell: Callable[[Loaded], None]) -> None:
        """Begin without load. tell: tells the frontend that has invited this one."""
        super().__init__()
        self._members = members
        self._tell = tell

    def look(self) -> bool:
        """Tell the load, for the last time when it has ended."""
        load = self._members.load()
        self._tell(load)
        return load.running > 0
