"""The choice of an engine's placer by the option."""

from __future__ import annotations

from sidestep.frontend.placement.placer import Placer
from sidestep.ipc.common import registry
from sidestep.ipc.config import EngineConfig


def make_placer(config: EngineConfig) -> Placer:
    """Return the placer that the options name. It has started nothing yet."""
    placer: Placer = registry.load(registry.PLACERS[config.placement.placer])(config)
    return placer
