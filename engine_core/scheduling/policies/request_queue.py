"""The requests that wait, in the order that a scheduling policy gives them.

Removal is lazy: a request that is no longer waiting is skipped when it comes to the front.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request


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
