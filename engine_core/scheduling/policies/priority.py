"""The lowest priority number first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import takewhile

from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.policies.request_queue import RequestQueue


class PriorityPolicy(Policy):
    """The lowest priority number goes first; among equals, the request that arrived first.

    A waiting request preempts running ones whose number is higher.
    """

    def __init__(self) -> None:
        super().__init__(PriorityQueue())

    def ranked(self, running: dict[Request, None]) -> dict[Request, None]:
        """Return the running requests by their priority numbers and times of arrival."""
        return dict.fromkeys(sorted(running, key=_key))

    def urgent(self) -> Request | None:
        """Return the request that enters next."""
        return self.queue.peek()

    def victims(
        self, running: dict[Request, None], urgent: Request | None = None
    ) -> Iterator[Request]:
        """Yield the running requests, the last first; for a waiting one, only the less urgent."""
        if urgent is None:
            return reversed(running)
        priority = urgent.priority
        return takewhile(lambda request: request.priority > priority, reversed(running))

    def charge(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Charge nothing: the order does not depend on tokens."""


def _key(request: Request) -> tuple[int, float]:
    return request.priority, request.timing.arrival


class PriorityQueue(RequestQueue):
    """Lowest priority number first; among equals the one that arrived first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, float, int, Request]] = []
        self._count = 0

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in self._heap if entry[3].status is not RequestStatus.FINISHED)

    def _insert(self, request: Request, *, back: bool) -> None:
        self._count += 1  # keeps the order of equal arrivals, and requests out of the comparison
        heapq.heappush(self._heap, (*_key(request), self._count, request))

    def _substitute(self, request: Request, other: Request) -> None:
        index = next(i for i, entry in enumerate(self._heap) if entry[3] is request)
        self._heap[index] = (*self._heap[index][:3], other)

    def _first(self) -> Request | None:
        return self._heap[0][3] if self._heap else None

    def _drop_first(self) -> None:
        heapq.heappop(self._heap)
