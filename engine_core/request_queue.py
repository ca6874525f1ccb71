"""Waiting requests in the order of the scheduling policy. Removal is lazy: a request that is no longer waiting is
skipped when it comes to the front."""

from __future__ import annotations

import abc
import heapq
from collections import deque
from collections.abc import Iterator

from sidestep.engine_core.request import Request, Status


class RequestQueue(abc.ABC):
    """Requests that wait for a slot, preempted ones included."""

    def __init__(self) -> None:
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._length} waiting)"

    def add(self, request: Request) -> None:
        """A new request."""
        self._length += 1
        self._insert(request, back=True)

    def put_back(self, request: Request) -> None:
        """A preempted request: before all that have not run yet."""
        self._length += 1
        self._insert(request, back=False)

    def pop(self) -> Request:
        """Takes the first request. The caller has looked with `peek`."""
        request = self._skip_finished()
        assert request is not None
        self._drop_first()
        self._length -= 1
        return request

    def peek(self) -> Request | None:
        """The first request."""
        return self._skip_finished()

    def forget(self) -> None:
        """One of the waiting requests has ended; it stays inside until it comes to the front."""
        self._length -= 1

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Those that wait, in no particular order."""

    @abc.abstractmethod
    def _insert(self, request: Request, *, back: bool) -> None: ...

    @abc.abstractmethod
    def _first(self) -> Request | None: ...

    @abc.abstractmethod
    def _drop_first(self) -> None: ...

    def _skip_finished(self) -> Request | None:
        while (request := self._first()) is not None and request.status is Status.FINISHED:
            self._drop_first()
        return request


class FcfsQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        return (r for r in self._queue if r.status is not Status.FINISHED)

    def _insert(self, request: Request, *, back: bool) -> None:
        (self._queue.append if back else self._queue.appendleft)(request)

    def _first(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def _drop_first(self) -> None:
        self._queue.popleft()


class PriorityQueue(RequestQueue):
    """Lowest priority number first; among equals the one that arrived first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, float, int, Request]] = []
        self._count = 0

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in self._heap if entry[3].status is not Status.FINISHED)

    def _insert(self, request: Request, *, back: bool) -> None:
        self._count += 1  # keeps the order of equal arrivals, and requests out of the comparison
        heapq.heappush(self._heap, (request.priority, request.arrival, self._count, request))

    def _first(self) -> Request | None:
        return self._heap[0][3] if self._heap else None

    def _drop_first(self) -> None:
        heapq.heappop(self._heap)


QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}
"""By the name of SchedulerConfig.scheduling_policy."""
