"""The reports of ranks whose step has raised, until all ranks have reported.

Ranks of a stage compute the same step, and most exceptions come to all of them at the same place.
Then no rank waits for another, and all can go on from empty tables. Where one rank alone has
raised, the others wait for it in an operation among ranks, and none of them can go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sidestep.executor.base import StepFailed
from sidestep.ipc.common.errors import EngineDeadError

_PATIENCE_S = 2.0
"""Seconds without a message after which a rank that has not reported counts as waiting."""


class RankFailures:
    """Collects the reports about one step."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without reports."""
        self._num_ranks = num_ranks
        self._clock = clock
        self._reports: dict[int, StepFailed] = {}
        self._until = 0.0

    def __repr__(self) -> str:
        return f"RankFailures({self._reports})"

    def take(self, rank: int, failed: StepFailed) -> None:
        """Take the report of a rank."""
        self._reports[rank] = failed
        self._until = self._clock() + _PATIENCE_S

    def ran(self, step_id: int) -> None:
        """Note that a step's output has come: the ranks may still be at work on earlier steps.

        Raises EngineDeadError if another rank has reported that step, or one before it.
        """
        self._until = self._clock() + _PATIENCE_S
        for failed in self._reports.values():
            if failed.step_id <= step_id:
                raise EngineDeadError(failed.text)

    @property
    def next_look(self) -> float | None:
        """The time until which the others may report; None if no rank has."""
        return self._until if self._reports else None

    def take_agreed(self) -> StepFailed | None:
        """Return the report of all ranks, and forget it; None while some have not reported.

        Raises EngineDeadError where ranks differ, or one does not report: it waits for the others.
        """
        if not self._reports:
            return None
        first = next(iter(self._reports.values()))
        if len(self._reports) < self._num_ranks:
            if self._clock() < self._until:
                return None
            raise EngineDeadError(first.text)
        places = {(one.step_id, one.place, one.slot) for one in self._reports.values()}
        if len(places) > 1:
            raise EngineDeadError(first.text)
        agreed = self._reports[min(self._reports)]
        self._reports.clear()
        return agreed
