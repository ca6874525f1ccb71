"""A head, and agents that stand for hosts, each with an address of the loopback network."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.placement.join import JoinPlacer
from sidestep.frontend.placement.node.node_args import NodeArgs
from sidestep.ipc.processes.process import Child, spawn


def spawn_node(placer: JoinPlacer, address: str, **more: Any) -> Child:
    """Start the agent of a host as a child process."""
    args = NodeArgs(invitation=placer.head.invitation, name=address, address=address, **more)
    return spawn("node", "sidestep.frontend.placement.node.agent:main", args)


@contextmanager
def joined(*addresses: str, **options: Any) -> Iterator[tuple[JoinPlacer, list[Child]]]:
    """Begin a placer, and start an agent for each address. options: of the engine."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given: dict[str, Any] = {
            "device": "fake",
            "placer": "join",
            "head_address": "127.0.0.1:0",
            "invitation_file": str(folder / "invitation"),
            "placer_timeout": 60.0,
        }
        placer = JoinPlacer(EngineArgs(**(given | options)).create_engine_config())
        placer.begin()
        stack.callback(placer.close)
        nodes = [spawn_node(placer, address) for address in addresses]
        for node in nodes:
            stack.callback(node.stop)
        yield placer, nodes
