"""The status of a replica for people."""

from __future__ import annotations

from typing import NamedTuple

from sidestep.ipc.transport.messages import Ready


class ReplicaStatus(NamedTuple):
    """The status of one data-parallel replica, for people."""

    number: int
    ready: Ready | None
    """The message of its start; None if it had died before this frontend joined."""
    dead: str | None
    """The cause of its death, if it stays dead; else None."""
    stalled: str | None = None
    """The reason why it counts as stalled: it lives and makes no progress."""
    restarting: str | None = None
    """The cause of its death while it is being started again; else None."""
