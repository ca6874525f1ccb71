"""Counts of deaths and of what was done about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sidestep.frontend.replicas.engine_client import Origin


@dataclass
class RecoveryCounts:
    """These counts of one frontend, since it began."""

    restarts: Counter[Origin] = field(default_factory=Counter)
    """Starts of replicas that had died, by where the death began. A frontend that has joined the
    engine counts none."""
    replayed: int = 0
    """Requests that were sent to a replica again, after the death of the one that had them."""
    blamed: int = 0
    """Requests that ended because they ran alone at a death in probation."""
    suspects: int = 0
    """Requests that run in probation now, or wait for their turn."""
    pause_s: float = 0.0
    """Seconds that requests have waited for a replica to serve again, all together."""
    joined: int = 0
    """Replicas that have been added because of the load. A frontend that has joined counts none."""
    left: int = 0
    """Replicas that have been ended because the load did not need them, likewise."""
