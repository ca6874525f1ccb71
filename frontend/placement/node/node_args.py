"""The arguments of an agent."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.hosts.node_messages import NodeInvitation


@dataclass(frozen=True)
class NodeArgs:
    """Arguments of an agent, which another process may send it as JSON."""

    invitation: NodeInvitation
    name: str
    """The host's name in the log and in /health."""
    address: str | None = None
    """The address by which other hosts reach this one; None for that of the way to the head."""
    gpus: tuple[str, ...] = ()
    """The GPUs that it offers, as names for CUDA_VISIBLE_DEVICES."""
    max_replicas: int = 1
    """Most replicas that may have ranks here at once."""
    max_ranks: int | None = None
    """Most ranks at once; None for no limit but the GPUs."""
    wait_s: float = 300.0
    """Seconds that it tries to reach the head at the start."""
