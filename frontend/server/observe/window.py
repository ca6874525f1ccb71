"""The last values of a measure, for people who watch: a histogram is too coarse for them, and never
forgets.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Percentiles(msgspec.Struct):
    """Of the last values; None while there are none."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Window:
    """The last `size` values themselves."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.add = self._values.append

    def values(self) -> list[float]:
        """Oldest first."""
        return list(self._values)


def percentiles(values: list[float]) -> Percentiles:
    """Nearest rank."""
    ordered = sorted(values)
    count = len(ordered)
    p50, p90, p99 = (
        ordered[min(count - 1, q * count // 100)] if count else None for q in (50, 90, 99)
    )
    return Percentiles(count, p50, p90, p99)
