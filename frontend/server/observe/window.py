"""Last values of a measurement, for people who watch the engine live.

A histogram is too coarse for them, and never forgets.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Percentiles(msgspec.Struct):
    """Percentiles of the last values; None while there are no values."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Window:
    """Last `size` values of a measurement."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.add = self._values.append

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self._values)


def percentiles(values: list[float]) -> Percentiles:
    """Return the percentiles of these values, by the nearest rank."""
    ordered = sorted(values)
    count = len(ordered)
    p50, p90, p99 = (
        ordered[min(count - 1, q * count // 100)] if count else None for q in (50, 90, 99)
    )
    return Percentiles(count, p50, p90, p99)
