"""First come, first served. Frontends take turns, so that none can crowd the others out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.policies.request_queue import RequestQueue


class FcfsPolicy(Policy):
    """Whoever came first goes first. A waiting request preempts nobody.

    A frontend's turn is over when one of its requests enters, whatever the request's length. So
    the queue alone counts the turns, and there is nothing to charge.
    """

    def __init__(self) -> None:
        super().__init__(FcfsQueue())

    def ranked(self, running: dict[Request, None]) -> dict[Request, None]:
        """Return the running requests in the order in which they have entered."""
        return running

    def urgent(self) -> Request | None:
        """Return None."""
        return None

    def victims(
        self, running: dict[Request, None], urgent: Request | None = None
    ) -> Iterator[Request]:
        """Yield the running requests, the newest first; none for a waiting request."""
        return reversed(running) if urgent is None else iter(())

    def charge(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Charge nothing: turns do not depend on tokens."""


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
