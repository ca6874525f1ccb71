"""Waiting requests in the order of the scheduling policy.

Removal is lazy: a request that is no longer waiting is skipped when it comes to the front.
"""

from __future__ import annotations

import abc
import heapq
from collections import deque
from collections.abc import Iterator

from sidestep.engine_core.requests.request import Request, RequestStatus


class RequestQueue(abc.ABC):
    """Requests that wait for a slot, preempted ones included."""

    def __init__(self) -> None:
        self._length = 0
        self.num_tokens = 0
        """Tokens of the prompts that wait."""

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._length} waiting)"

    def add(self, request: Request) -> None:
        """Add a new request."""
        self._note(request, 1)
        self._insert(request, back=True)

    def put_back(self, request: Request) -> None:
        """Add a preempted request, before all that have not run yet."""
        self._note(request, 1)
        self._insert(request, back=False)

    def replace(self, request: Request, other: Request) -> None:
        """Put `other` at the queue position of a request that has been forgotten."""
        self._note(other, 1)
        self._substitute(request, other)

    def pop(self) -> Request:
        """Remove and return the first request. The caller has looked with `peek`."""
        request = self._skip_finished()
        assert request is not None
        self._drop_first()
        self._note(request, -1)
        return request

    def peek(self) -> Request | None:
        """Return the first request; None if the queue is empty."""
        return self._skip_finished()

    def forget(self, request: Request) -> None:
        """Stop counting a waiting request that has ended.

        It stays inside until it comes to the front.
        """
        self._note(request, -1)

    def _note(self, request: Request, change: int) -> None:
        self._length += change
        self.num_tokens += change * request.num_prompt

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that wait, in no particular order."""

    @abc.abstractmethod
    def _insert(self, request: Request, *, back: bool) -> None: ...

    @abc.abstractmethod
    def _substitute(self, request: Request, other: Request) -> None: ...

    @abc.abstractmethod
    def _first(self) -> Request | None: ...

    @abc.abstractmethod
    def _drop_first(self) -> None: ...

    def _skip_finished(self) -> Request | None:
        while (request := self._first()) is not None and request.status is RequestStatus.FINISHED:
            self._drop_first()
        return request


class FcfsQueue(RequestQueue):
    """First come, first served for each frontend.

    The frontends take turns, so that none can crowd the others out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._preempted: deque[Request] = deque()
        """Preempted requests, before all others."""
        self._queues: dict[int, deque[Request]] = {}
        self._turns: deque[int] = deque()
        """The clients that have a queue, the next one first."""

    def __iter__(self) -> Iterator[Request]:
        return (
            r
            for queue in (self._preempted, *self._queues.values())
            for r in queue
            if r.status is not RequestStatus.FINISHED
        )

    def _insert(self, request: Request, *, back: bool) -> None:
        if not back:
            self._preempted.appendleft(request)
            return
        queue = self._queues.get(request.client)
        if queue is None:
            queue = self._queues[request.client] = deque()
            self._turns.append(request.client)
        queue.append(request)

    def _substitute(self, request: Request, other: Request) -> None:
        queue = self._preempted if request in self._preempted else self._queues[request.client]
        queue[queue.index(request)] = other

    def _first(self) -> Request | None:
        if self._preempted:
            return self._preempted[0]
        return self._queues[self._turns[0]][0] if self._turns else None

    def _drop_first(self) -> None:
        if self._preempted:
            self._preempted.popleft()
            return
        client = self._turns.popleft()
        queue = self._queues[client]
        queue.popleft()
        if queue:
            self._turns.append(client)
        else:
            del self._queues[client]


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
        heapq.heappush(self._heap, (request.priority, request.arrival, self._count, request))

    def _substitute(self, request: Request, other: Request) -> None:
        index = next(i for i, entry in enumerate(self._heap) if entry[3] is request)
        self._heap[index] = (*self._heap[index][:3], other)

    def _first(self) -> Request | None:
        return self._heap[0][3] if self._heap else None

    def _drop_first(self) -> None:
        heapq.heappop(self._heap)


QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FcfsQueue, "priority": PriorityQueue}
"""Queue classes by the name of SchedulerConfig.scheduling_policy."""
