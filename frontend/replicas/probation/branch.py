"""A frontend's place in the tree of frontends that share an engine, as far as suspects go.

The frontend that started the engine is the root, and decides (judge.py). Each frontend tells the
one that has invited it of its own suspects and of those of the frontends that it has invited, and
passes decisions on to them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from sidestep.ipc.transport.owner_line import (
    Blamed,
    Claimed,
    News,
    Parked,
    Passed,
    Path,
    Suspected,
    Turn,
)

REPORT_S = 5.0
"""Seconds that frontends have to report their suspects."""


class Own(Protocol):
    """The requests of this frontend. A suspect is known by the handle of its first choice."""

    def claim(self, replica: int | None, *, ends_turn: bool) -> None:
        """Keep a replica for suspects, or none: no other request goes or stays there.

        ends_turn: whether suspects that have not begun to run must wait for another turn.
        """

    def take_suspects(self) -> list[tuple[int, int]]:
        """Return the suspects since the last call, each behind its replica."""

    def run(self, suspects: Iterable[int]) -> None:
        """Let these suspects run on the replica that is kept."""

    def park(self, suspects: Iterable[int]) -> None:
        """Let these requests, which have passed, leave the replica that is kept."""

    def blame(self, suspect: int, cause: str) -> None:
        """End a suspect with an error that names the cause of the last death."""


class Up(Protocol):
    """The way to the frontend that decides."""

    def report(self, number: int, suspects: list[tuple[int, Path]]) -> None:
        """Tell the suspects, each with its replica, in answer to a claim."""

    def passed(self, suspects: list[Path]) -> None:
        """Tell which suspects have given tokens again, or have ended."""


class Line(Protocol):
    """The lines to the frontends that this one has invited, by their numbers."""

    @property
    def attending(self) -> Iterable[int]:
        """The guests whose event loops run, as far as is known."""

    def tell(self, guest: int, news: News) -> None:
        """Send one of them news."""

    def tell_all(self, news: News) -> None:
        """Send all that have joined news."""


class Branch:
    """The suspects of a frontend and of all that it has invited."""

    def __init__(self, up: Up, line: Line) -> None:
        """Begin without suspects."""
        self._up = up
        self._line = line
        self._own: Own | None = None
        self._claimed = Claimed(0, None, ends_turn=False)
        self._awaited: set[int] = set()
        """The guests whose report to the last claim is still to come."""
        self._reports: list[tuple[int, Path]] = []
        self._suspects: defaultdict[int, set[Path]] = defaultdict(set)
        """The suspects of each guest."""

    def begin(self, own: Own) -> None:
        """Use this frontend's requests from now on."""
        self._own = own
        own.claim(self._claimed.replica, ends_turn=False)

    # News from above.

    def take(self, news: Claimed | Turn | Parked | Blamed) -> None:
        """Take a decision, for this frontend or its guests."""
        if isinstance(news, Claimed):
            self._claim(news)
        elif isinstance(news, Blamed):
            guest, rest = news.suspect[0], news.suspect[1:]
            if rest:
                self._line.tell(guest, Blamed(rest, news.cause))
            elif self._own is not None:
                self._own.blame(guest, news.cause)
        else:
            own = list[int]()
            guests: defaultdict[int, list[Path]] = defaultdict(list)
            for path in news.suspects:
                if path[1:]:
                    guests[path[0]].append(path[1:])
                else:
                    own.append(path[0])
            if own and self._own is not None:
                (self._own.run if isinstance(news, Turn) else self._own.park)(own)
            for guest, suspects in guests.items():
                self._line.tell(guest, type(news)(suspects))

    def _claim(self, claimed: Claimed) -> None:
        self._claimed = claimed
        if self._own is not None:
            self._own.claim(claimed.replica, ends_turn=claimed.ends_turn)
        self._awaited = set(self._line.attending)
        self._line.tell_all(claimed)
        try:
            asyncio.get_running_loop().call_later(REPORT_S, self._give_up, claimed.number)
        except RuntimeError:  # the death was noticed by a call from outside the event loop
            self._awaited.clear()
        self._report()

    def _give_up(self, number: int) -> None:
        """Do without the guests that have not reported.

        Their event loops are late. Their suspects get turns when they do report.
        """
        if number == self._claimed.number and self._awaited:
            self._awaited.clear()
            self._report()

    def _report(self) -> None:
        if not self._awaited:
            if self._own is not None:
                self._reports += [(at, (handle,)) for at, handle in self._own.take_suspects()]
            reports, self._reports = self._reports, []
            self._up.report(self._claimed.number, reports)

    # Reports from below.

    def own_passed(self, handles: Iterable[int]) -> None:
        """Report suspects of this frontend that have passed."""
        self._up.passed([(handle,) for handle in handles])

    def joined(self, guest: int) -> None:
        """Tell a guest that has just joined which replica is kept."""
        self._line.tell(guest, self._claimed)

    def take_report(self, guest: int, report: Suspected | Passed) -> None:
        """Take a report of a guest."""
        if isinstance(report, Passed):
            passed = [(guest, *path) for path in report.suspects]
            self._suspects[guest].difference_update(passed)
            self._up.passed(passed)
            return
        found = [(at, (guest, *path)) for at, path in report.suspects]
        self._suspects[guest].update(path for _, path in found)
        self._reports += found
        if report.number == self._claimed.number:
            self._awaited.discard(guest)
            self._report()

    def left(self, guest: int) -> None:
        """Forget a guest that has left, with its requests."""
        if gone := self._suspects.pop(guest, None):
            self._up.passed(sorted(gone))
        if guest in self._awaited:
            self._awaited.discard(guest)
            self._report()
