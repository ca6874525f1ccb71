"""The budget of starts of replicas that have died, and the pauses before them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

WINDOW_S = 600.0
"""Seconds for which a start counts."""
BACKOFF_S = (0.0, 5.0, 30.0)
"""Seconds before the first start within the window, the second, and all that follow."""


class RestartBudget:
    """The starts that each replica has left."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no starts. limit: most starts of a replica within the window."""
        self._limit = limit
        self._clock = clock
        self._starts: defaultdict[int, list[float]] = defaultdict(list)
        self._totals: defaultdict[int, int] = defaultdict(int)

    def take(self, replica: int) -> float | None:
        """Count a start of a replica, and return the seconds to wait before it.

        Return None if the replica has no start left.
        """
        now = self._clock()
        recent = self._starts[replica] = [at for at in self._starts[replica] if now - at < WINDOW_S]
        if len(recent) >= self._limit:
            return None
        recent.append(now)
        self._totals[replica] += 1
        return BACKOFF_S[min(len(recent), len(BACKOFF_S)) - 1]

    def take_free(self, replica: int) -> float | None:
        """Count a start that the budget need not allow, and return the seconds to wait before it.

        Return None if no replica is ever started again.
        """
        if not self._limit:
            return None
        self._totals[replica] += 1
        return 0.0

    def total(self, replica: int) -> int:
        """Return the number of times that a replica has been started again."""
        return self._totals[replica]

    def spent(self, replica: int) -> str:
        """Return what to add to the cause of a death that is not followed by a start."""
        count = len(self._starts[replica])
        if not self._limit or count < self._limit:
            return ""
        return f"; it has been started again {count} times in {WINDOW_S / 60:g} minutes"
