"""Where one request is: it waits, runs, is preempted or has ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RequestStatus(enum.IntEnum):
    """State of a request in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Life:
    """The state of a request, and its slot."""

    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    """The worker's row, from being scheduled until it ends or is preempted; -1 without one."""
    parked: bool = False
    """Whether it runs, but gets no row in any step for now."""
    num_preemptions: int = 0

    def seat(self, slot: int) -> None:
        """Note that it runs from now on, in this slot."""
        self.slot = slot
        self.status = RequestStatus.RUNNING

    def park(self) -> None:
        """Let it have no row in any step for now."""
        self.parked = True

    def unpark(self) -> None:
        """Let it have rows again."""
        self.parked = False

    def preempt(self) -> None:
        """Let it wait again. It keeps its slot until `release`."""
        self.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self.parked = False

    def finish(self) -> None:
        """End it. It keeps its slot until `release`."""
        self.status = RequestStatus.FINISHED
        self.parked = False

    def release(self) -> None:
        """Take its slot, which no step in flight touches any more."""
        self.slot = -1
