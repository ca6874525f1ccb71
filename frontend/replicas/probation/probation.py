"""The probation of the requests that may be the cause of a replica's death.

All frontends of an engine report their *suspects*: the requests that had begun on the replica. They
run again on one replica, which is kept for them, a group at a time. A suspect passes when it has
given tokens again, or has ended. When the replica dies, the suspects of that group run one by one.
One that runs alone at a death is blamed for it. So a request that kills the replica whenever it
runs costs three deaths: the first, one in a group and one alone.

Nothing else runs beside a group. Another request could be the cause of the next death, and nobody
would know. The class decides synchronously, and returns the actions that must follow, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Path = tuple[int, ...]
"""The name of a suspect: see ipc/transport/owner_line.py."""

GROUP_SIZE = 8
"""Number of suspects that run together, as long as none of them has died in a group."""
MOST_FREE_DEATHS = 3
"""Number of deaths in probation, with no suspect passing between, that are nobody else's fault.

Two suspects of one group may each kill the replica: once together, and once each alone. A machine
that kills whatever runs on it must not end all requests this way.
"""


class Claim(NamedTuple):
    """All frontends keep a replica for suspects, or None; they report their suspects."""

    number: int
    replica: int | None
    ends_turn: bool
    """Whether suspects that had their turn and have not begun must wait for another one."""


class AskIdle(NamedTuple):
    """Say `idle` when the replica has nothing to do."""

    replica: int


class Run(NamedTuple):
    """These suspects may run on the replica that is kept."""

    suspects: tuple[Path, ...]


class Park(NamedTuple):
    """These requests have passed, and must leave the replica that is kept."""

    suspects: tuple[Path, ...]


class Blame(NamedTuple):
    """This suspect is the cause of the last death, and ends."""

    suspect: Path


Action = Claim | AskIdle | Run | Park | Blame


@dataclass
class _Turn:
    """The suspects that may run now."""

    suspects: tuple[Path, ...] = ()
    open: set[Path] = field(default_factory=set)
    """The suspects of the turn that have not passed."""


class Probation:
    """The suspects of all frontends, and the replica where they run."""

    def __init__(self, serving: Iterable[int] = ()) -> None:
        """Begin without suspects. serving: the replicas that serve."""
        self._serving = set(serving)
        self._starting: set[int] = set()
        self.place: int | None = None
        """The replica that is kept for suspects."""
        self.number = 0
        """Number of the last claim."""
        self._awaits_reports = False
        self._asks_idle = False
        self._reports: list[tuple[int, Path]] = []
        """The suspects that have been reported since the last claim, each with its replica."""
        self._queue: deque[tuple[Path, ...]] = deque()
        self._turn = _Turn()
        self._fallen: tuple[int, _Turn] | None = None
        """The turn that a death has ended, and its replica, until all frontends have reported."""
        self._blames = True
        """Whether the death that ended the turn may have been a request's fault."""
        self._num_free_deaths = 0

    def __repr__(self) -> str:
        return (
            f"Probation(place={self.place}, turn={self._turn.suspects}, queue={list(self._queue)})"
        )

    def is_free(self, replica: int) -> bool:
        """Return whether a death of this replica now is expected, so that no budget is charged."""
        return self.runs_on(replica) and self._num_free_deaths < MOST_FREE_DEATHS

    def runs_on(self, replica: int) -> bool:
        """Return whether suspects that have not passed may run on a replica now."""
        return replica == self.place and bool(self._turn.open)

    # Events.

    def died(self, replica: int, *, returns: bool, blames: bool = True) -> list[Action]:
        """Take note of a death.

        returns: whether the replica is being started again, and soon. blames: whether a request may
        be the cause.
        """
        if self.runs_on(replica):
            self._fallen = replica, self._turn
            self._num_free_deaths += blames
            self._blames = blames
        if replica == self.place:
            self._turn = _Turn()
        self._serving.discard(replica)
        if returns:
            self._starting.add(replica)
            if self.place is None:
                self.place = replica
        else:
            self._starting.discard(replica)
            if self.place == replica:
                self.place = None
        return self._claim()

    def serves(self, replica: int) -> list[Action]:
        """Take note that a replica serves again."""
        self._starting.discard(replica)
        self._serving.add(replica)
        return self._next()

    def reported(self, number: int, suspects: Iterable[tuple[int, Path]]) -> list[Action]:
        """Take the reports of all frontends. number: that of the claim that they answer."""
        self._reports += suspects
        if number != self.number:
            return []
        self._awaits_reports = False
        actions = self._judge()
        return actions + self._next()

    def passed(self, suspects: Iterable[Path]) -> list[Action]:
        """Take note of suspects that have given tokens again, or have ended."""
        gone = set(suspects)
        now = tuple(path for path in self._turn.suspects if path in gone & self._turn.open)
        if now:
            self._num_free_deaths = 0
            self._turn.open -= gone
        self._forget(gone)
        if self._fallen is not None:
            self._fallen[1].open -= gone
        if self._turn.open:
            return [Park(now)] if now else []
        return self._next()

    def idle(self, replica: int) -> list[Action]:
        """Take note that a replica has nothing to do."""
        if replica != self.place or not self._asks_idle:
            return []
        self._asks_idle = False
        if not self._queue:
            return self._next()
        group = self._queue.popleft()
        self._turn = _Turn(group, set(group))
        return [Run(group)]

    def ask_again(self) -> list[Action]:
        """Return the question for an idle replica again, if its answer is still to come."""
        return [AskIdle(self.place)] if self._asks_idle and self.place is not None else []

    # Decisions.

    def _claim(self) -> list[Action]:
        self.number += 1
        self._awaits_reports, self._asks_idle = True, False
        return [Claim(self.number, self.place, ends_turn=not self._turn.open)]

    def _judge(self) -> list[Action]:
        """Sort the suspects that have been reported into groups; return who is blamed."""
        reports, self._reports = self._reports, []
        fallen, self._fallen = self._fallen, None
        replica, turn = fallen if fallen is not None else (None, _Turn())
        ran = {path for at, path in reports if at == replica}
        found = tuple(path for path in turn.suspects if path in ran)
        is_blamed = self._blames and len(turn.suspects) == 1 and ran == set(turn.suspects)
        self._forget({path for _, path in reports})
        others = list(dict.fromkeys(path for _, path in reports if path not in found))
        for start in range(0, len(others), GROUP_SIZE):
            self._queue.append(tuple(others[start : start + GROUP_SIZE]))
        # Suspects that had not begun at the death come next, behind the ones that had.
        if waiting := tuple(path for path in turn.suspects if path in turn.open - ran):
            self._queue.appendleft(waiting)
        if is_blamed:
            return [Blame(turn.suspects[0])]
        self._queue.extendleft((path,) for path in reversed(found))
        return []

    def _forget(self, gone: set[Path]) -> None:
        """Remove suspects from the queue."""
        groups = (tuple(p for p in group if p not in gone) for group in self._queue)
        self._queue = deque(group for group in groups if group)

    def _next(self) -> list[Action]:
        """Let the next group run, when nothing else does; end the probation after the last."""
        if self._awaits_reports or self._turn.open or self._asks_idle:
            return []
        if not self._queue:
            self._turn = _Turn()
            if self.place is None:
                return []
            self.place = None
            return self._claim()
        if self.place is None:
            if not (places := self._serving or self._starting):
                return []
            self.place = min(places)
            return self._claim()
        if self.place not in self._serving:
            return []
        passed, self._turn = self._turn.suspects, _Turn()
        self._asks_idle = True
        return [*([Park(passed)] if passed else []), AskIdle(self.place)]
