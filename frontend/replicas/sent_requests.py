"""The requests of a frontend that have not ended, each with the replica that has it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sidestep.ipc.transport.messages import AddRequest

NOWHERE = -1
"""Number that stands for a replica in a request that no replica has."""
HELD = -2
"""Number that stands for a replica in a suspect that waits for its turn in probation."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request that has not ended, with all its choices."""

    message: AddRequest
    live: set[int]
    """Handles of its choices that have not ended."""
    first: int
    """Handle of the first choice of the request as it came, before its choices were parted."""
    replica: int = NOWHERE
    has_run: bool = False
    """Whether the replica has begun to compute it."""
    is_routed: bool = False
    """Whether the router has chosen its replica, and counts it there."""
    is_leaving: bool = False
    """Whether it has been aborted at its replica, to go on elsewhere."""
    since: float = field(default_factory=time.monotonic)
    """time.monotonic() from which on it waits for a replica, if it does."""

    def wait(self, place: int) -> None:
        """Let it wait for a replica: NOWHERE, or HELD."""
        self.replica, self.since = place, time.monotonic()
        self.has_run = self.is_routed = self.is_leaving = False


class SentRequests:
    """These requests by the handle of each choice."""

    def __init__(self) -> None:
        self._by_handle: dict[int, Sent] = {}

    def __len__(self) -> int:
        """Return the number of choices."""
        return len(self._by_handle)

    def get(self, handle: int) -> Sent | None:
        """Return the request of a choice; None if the choice has ended."""
        return self._by_handle.get(handle)

    def put(self, sent: Sent) -> None:
        """Add a request."""
        self._by_handle |= dict.fromkeys(sorted(sent.live), sent)

    def end(self, handle: int) -> Sent | None:
        """Remove a choice that has ended, and return its request; None for an unknown one."""
        sent = self._by_handle.pop(handle, None)
        if sent is not None:
            sent.live.remove(handle)
        return sent

    def take(self, replica: int) -> list[Sent]:
        """Remove the requests of a replica, or of none (NOWHERE), and return them in order."""
        taken = self.at(replica)
        for sent in taken:
            for handle in sent.live:
                del self._by_handle[handle]
        return taken

    def at(self, replica: int) -> list[Sent]:
        """Return the requests of a replica, or of none, in order."""
        return list({id(sent): sent for sent in self._each(replica)}.values())

    def handles_of(self, first: int) -> list[int]:
        """Return the handles of the choices of a request, wherever they are."""
        return [handle for handle, sent in self._by_handle.items() if sent.first == first]

    def _each(self, replica: int) -> Iterator[Sent]:
        return (sent for sent in self._by_handle.values() if sent.replica == replica)

    @property
    def busy(self) -> set[int]:
        """The replicas that have requests."""
        return {sent.replica for sent in self._by_handle.values()} - {NOWHERE, HELD}

    def clear(self) -> None:
        """Remove all."""
        self._by_handle.clear()
