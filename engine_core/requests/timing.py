"""The times of one request's life."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Timing:
    """When a request reached each stage. All times are seconds on the scheduler's clock.

    A time of None has not come yet.
    """

    arrival: float
    """When its frontend took it."""
    queued: float = 0.0
    """When the core took it."""
    scheduled: float | None = None
    """When it was first scheduled."""
    first_token: float | None = None
    """When it got its first token."""

    def queued_at(self, now: float) -> None:
        """Note that the core has taken the request."""
        self.queued = now

    def scheduled_at(self, now: float) -> None:
        """Note that the request has been scheduled for the first time."""
        self.scheduled = now

    def first_token_at(self, now: float) -> None:
        """Note that the request has its first token."""
        self.first_token = now
