"""The interface of scheduling policies, which decide who goes first and who is preempted.

A policy is one file in this folder and one line of POLICIES in ipc/common/registry.py.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator

from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.policies.request_queue import RequestQueue


class Policy(abc.ABC):
    """The order of the requests of one scheduler."""

    def __init__(self, queue: RequestQueue) -> None:
        """Begin with a queue that has this policy's order."""
        self.queue = queue
        """Requests that wait; the first enters next."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue!r})"

    @abc.abstractmethod
    def ranked(self, running: dict[Request, None]) -> dict[Request, None]:
        """Return the running requests, the most important first.

        running: the result of the last call without the requests that have left, and behind them
        the requests that have entered since.
        """

    @abc.abstractmethod
    def urgent(self) -> Request | None:
        """Return the waiting request that may preempt running ones; None if none may.

        Each step asks. If there is a request, `victims` says whom it may preempt.
        """

    @abc.abstractmethod
    def victims(
        self, running: dict[Request, None], urgent: Request | None = None
    ) -> Iterator[Request]:
        """Yield the running requests that may be preempted, in the order of preemption.

        running: as `ranked` returned it. urgent: the waiting request that would take their place;
        None if a running request needs blocks. All requests may be preempted then, also the one
        that needs them.
        """

    @abc.abstractmethod
    def charge(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Note that rows of these requests compute these numbers of tokens.

        The scheduler calls it when the running requests have their rows, and for each request that
        enters, before it asks for the next one. When the step is back, it calls it for the drafts
        that each row has verified, whose number was not known before. A token that is computed
        again, after a preemption or a late mask, counts again.
        """
