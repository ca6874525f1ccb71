"""The suspects of one frontend: where each was at the death, and whether it has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

PASSED_TOKENS = 2
"""Number of tokens that each choice of a suspect must give to pass.

Two steps are in flight at a death, so either of the next two tokens may be the one that kills.
"""


@dataclass
class Suspect:
    """A request that had begun at a death."""

    where: dict[int, int] = field(default_factory=dict)
    """Number of tokens that each choice which may have run had given, by the choice's handle."""
    replicas: list[int] = field(default_factory=list)
    """The replicas that have died with it, and have not been reported."""
    runs: bool = False
    """Whether it has its turn."""


class Suspects:
    """These requests, by the handle of the first choice of each."""

    def __init__(self) -> None:
        self._suspects: dict[int, Suspect] = {}
        self._gone: list[int] = []
        """Suspects that have ended, and have not been reported."""

    def __len__(self) -> int:
        return len(self._suspects)

    def hold(self, first: int, replica: int, where: dict[int, int], *, has_run: bool) -> None:
        """Let a request wait for its turn. has_run: whether it may have run at the death."""
        suspect = self._suspects.setdefault(first, Suspect())
        suspect.where |= where
        suspect.runs = False
        if has_run and replica not in suspect.replicas:
            suspect.replicas.append(replica)

    def __contains__(self, first: int) -> bool:
        return first in self._suspects

    def take_reports(self) -> list[tuple[int, int]]:
        """Return the suspects of deaths since the last call, each behind its replica."""
        found = [
            (replica, first)
            for first, suspect in self._suspects.items()
            for replica in suspect.replicas
        ]
        for suspect in self._suspects.values():
            suspect.replicas.clear()
        return found

    def run(self, firsts: Iterable[int]) -> None:
        """Give suspects their turn."""
        for first in firsts:
            if (suspect := self._suspects.get(first)) is not None:
                suspect.runs = True

    def end_turn(self, firsts: Iterable[int]) -> None:
        """Let suspects that have not begun to run wait for another turn."""
        for first in firsts:
            if (suspect := self._suspects.get(first)) is not None:
                suspect.runs = False

    def may_run(self, first: int) -> bool:
        """Return whether a suspect has its turn."""
        return first in self._suspects and self._suspects[first].runs

    def ended(self, first: int, handle: int) -> None:
        """Take note of the end of a choice."""
        suspect = self._suspects.get(first)
        if suspect is not None:
            suspect.where.pop(handle, None)
            if not suspect.where:
                del self._suspects[first]
                self._gone.append(first)

    def take_passed(self, count: Callable[[int], int]) -> list[int]:
        """Remove the suspects that have passed, and return them and those that have ended.

        count: returns the number of tokens of a choice by its handle.
        """
        gone, self._gone = self._gone, []
        for first, suspect in list(self._suspects.items()):
            if suspect.runs and all(
                count(handle) >= tokens + PASSED_TOKENS for handle, tokens in suspect.where.items()
            ):
                del self._suspects[first]
                gone.append(first)
        return gone

    def clear(self) -> None:
        """Suspect none."""
        self._suspects.clear()
        self._gone.clear()
