"""The number of replicas that an engine should have: decided from forecasts, without a clock."""

from __future__ import annotations

from typing import NamedTuple

_UP_S = 2.0
"""Seconds for which forecasts must be above the target before a replica is added."""
_CALM = 0.5
"""Share of the target that a forecast may reach where a replica is to leave."""
_FULL = 0.7
"""Share of the places of the replicas that stay which running requests may take then."""


class ScaleLimits(NamedTuple):
    """Limits that the user has set."""

    least: int
    most: int
    target_s: float
    """Seconds until the first token that a new request may have to wait."""
    calm_s: float
    """Seconds without need of a replica after which it leaves."""


class Load(NamedTuple):
    """The load of all replicas at a time."""

    forecast_s: float
    """Seconds until the first token of a request that comes now."""
    running: int
    """Sequences that have not ended."""
    places: int
    """Sequences that one replica runs at once."""


class Scaler:
    """Decides when a replica joins and when one leaves.

    One replica starts or leaves at a time, and the next decision is about the load that follows.
    """

    def __init__(self, limits: ScaleLimits) -> None:
        """Begin with a load that is neither high nor low."""
        self._limits = limits
        self._high_since: float | None = None
        self._low_since: float | None = None

    def __repr__(self) -> str:
        return f"Scaler({self._limits}, high since {self._high_since}, low since {self._low_since})"

    def decide(self, load: Load, num_serving: int, now: float) -> int:
        """Return 1 if a replica should join, -1 if one should leave, else 0.

        num_serving: replicas that serve. Called while none starts or leaves.
        """
        limits = self._limits
        self._high_since = _since(self._high_since, load.forecast_s > limits.target_s, now)
        self._low_since = _since(self._low_since, self._is_low(load, num_serving), now)
        if num_serving < limits.least:
            return self._decided(1)
        if num_serving < limits.most and _lasts(self._high_since, _UP_S, now):
            return self._decided(1)
        if num_serving > limits.least and _lasts(self._low_since, limits.calm_s, now):
            return self._decided(-1)
        return 0

    def _is_low(self, load: Load, num_serving: int) -> bool:
        """Return whether one replica less would do."""
        if num_serving < 2:
            return False
        left = num_serving - 1
        forecast_s = load.forecast_s * num_serving / left
        return forecast_s < _CALM * self._limits.target_s and load.running <= (
            _FULL * left * load.places
        )

    def _decided(self, change: int) -> int:
        self._high_since = self._low_since = None
        return change


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Return the time since which something holds, given the one known so far."""
    if not holds:
        return None
    return now if since is None else since


def _lasts(since: float | None, least_s: float, now: float) -> bool:
    return since is not None and now - since >= least_s
