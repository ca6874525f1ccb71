"""What an engine core process is started with."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.config import EngineConfig


@dataclass(frozen=True)
class ClientAddress:
    """Where one frontend listens: it binds both ends, the core connects."""

    to_core: str
    from_core: str


@dataclass(frozen=True)
class CoreArgs:
    """Sent to the core's process as JSON."""

    config: EngineConfig
    clients: tuple[ClientAddress, ...]
    """One for each frontend; a message's `client` is an index into it."""
