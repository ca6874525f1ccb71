"""The time until the first token of a request that comes now, foreseen from the queues.

Each replica computes prompts at a rate that is learnt while requests wait there: the tokens of the
requests that it begins, over the seconds in which some waited. So the rate falls where requests
wait for a slot and not for prompts, and the forecast rises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_MEMORY_S = 10.0
"""Seconds of waiting after which older ones count for 1/e in a replica's rate."""
_TYPICAL = 0.1
"""Weight of a request's work in the work of a typical one."""


@dataclass(slots=True)
class _Queue:
    """The requests of one replica that it has not begun."""

    waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Handle -> work in tokens, and the time of sending; the oldest first."""
    work: int = 0
    begun: float = 0.0
    """Tokens that the replica has begun, of late."""
    busy_s: float = 0.0
    """Seconds in which requests waited, of late."""
    since: float = 0.0
    """Time up to which `busy_s` counts."""

    def count(self, now: float) -> None:
        """Count the time up to now."""
        if self.waiting:
            self.busy_s += now - self.since
        self.since = now
        if self.busy_s > _MEMORY_S:
            self.begun *= _MEMORY_S / self.busy_s
            self.busy_s = _MEMORY_S

    def take(self, handle: int) -> int:
        """Remove a request, and return its work; 0 for one that does not wait here."""
        work, _ = self.waiting.pop(handle, (0, 0.0))
        self.work -= work
        return work


class TtftForecast:
    """The forecast of one frontend, from its own requests.

    Frontends that share an engine each see a part of the requests and of the rate at which these
    begin, so each foresees the same.
    """

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._at: dict[int, int] = {}
        """Handle -> the replica at which it waits."""
        self._typical = 0.0

    def __repr__(self) -> str:
        waiting = {replica: len(queue.waiting) for replica, queue in self._queues.items()}
        return f"TtftForecast(waiting={waiting})"

    def sent(self, handle: int, replica: int, work: int, now: float) -> None:
        """Take note of a request that a replica has been sent. work: tokens to compute."""
        queue = self._queues.setdefault(replica, _Queue(since=now))
        queue.count(now)
        queue.waiting[handle] = work, now
        queue.work += work
        self._at[handle] = replica
        self._typical += _TYPICAL * (work - self._typical) if self._typical else work

    def begun(self, handle: int, now: float) -> None:
        """Take note that a request has begun."""
        if (queue := self._queue_of(handle)) is not None:
            queue.count(now)
            queue.begun += queue.take(handle)

    def ended(self, handle: int, now: float) -> None:
        """Take note that a request has ended, or has left its replica, perhaps before it began."""
        if (queue := self._queue_of(handle)) is not None:
            queue.count(now)
            queue.take(handle)

    def lost(self, replica: int) -> None:
        """Forget a replica, with its queue and its rate."""
        if (queue := self._queues.pop(replica, None)) is not None:
            for handle in queue.waiting:
                del self._at[handle]

    def seconds(self, replicas: Iterable[int], now: float) -> float:
        """Return the foreseen seconds at the best of some replicas; 0 where nothing is known."""
        return min((self._seconds_at(replica, now) for replica in replicas), default=0.0)

    def _seconds_at(self, replica: int, now: float) -> float:
        queue = self._queues.get(replica)
        if queue is None:
            return 0.0
        queue.count(now)
        if not queue.waiting:
            return 0.0
        age = now - next(iter(queue.waiting.values()))[1]
        if not queue.begun:
            return age
        return max(age, (queue.work + self._typical) * queue.busy_s / queue.begun)

    def _queue_of(self, handle: int) -> _Queue | None:
        replica = self._at.pop(handle, None)
        return None if replica is None else self._queues[replica]
