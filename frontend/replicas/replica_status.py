"""A replica as people see it."""

from __future__ import annotations

from typing import NamedTuple

from sidestep.ipc.transport.messages import Ready


class ReplicaStatus(NamedTuple):
    """One data-parallel replica, as people are told of it."""

    number: int
    ready: Ready | None
    """What it said at its start; None if it had died before this frontend joined."""
    dead: str | None
    """What it has died of."""
    stalled: str | None = None
    """Why the replica counts as stalled: it lives and makes no progress."""
