"""The options that say on which hosts an engine's processes run: declared and checked here."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.common.options import Options, option
from sidestep.ipc.common.registry import PLACERS


@dataclass(frozen=True)
class PlacementConfig(Options):
    """The hosts of an engine's replicas."""

    placer: str = option(
        "local",
        "Where the processes of the replicas start: 'local' starts them on this machine.",
        choices=tuple(PLACERS),
    )
