"""The Ray actor that stands for one replica on one node: it runs the agent as a child process.

The actor does nothing else, and Ray sees nothing else: the resources that it holds, its name and
its node. When it ends, however it ends, the agent's lifeline is cut, and so the agent ends, and
with it the cores and workers that the agent has started.
"""

from __future__ import annotations

from typing import Any

from sidestep.frontend.placement.node.node_args import NodeArgs
from sidestep.ipc.common.logs import LogConfig
from sidestep.ipc.config import visible_gpus_of_environment
from sidestep.ipc.hosts.node_messages import NodeInvitation
from sidestep.ipc.processes.process import Child, spawn

_AGENT = "sidestep.frontend.placement.node.agent:main"
_LOOK_S = 60.0


class SidestepHost:
    """An actor that holds one agent. Ray makes it, on a node where its resources are free."""

    def __init__(
        self,
        name: str,
        invitation: str,
        address: str,
        num_ranks: int,
        has_gpus: bool,
        logs: dict[str, Any],
    ) -> None:
        """Start the agent.

        name: of the agent. invitation: text of a NodeInvitation. address: of this node. num_ranks:
        that it has room for. has_gpus: whether Ray has given it GPUs, which are those that are
        visible. logs: fields of a LogConfig.
        """
        gpus = visible_gpus_of_environment() if has_gpus else None
        self._agent: Child = spawn(
            "node",
            _AGENT,
            NodeArgs(
                invitation=NodeInvitation.decode(invitation),
                name=name,
                address=address,
                gpus=tuple(gpus or ()),
                max_ranks=num_ranks,
            ),
            log_config=LogConfig(**logs),
        )

    def wait(self) -> str:
        """Wait for the agent's end and return its cause."""
        while not self._agent.wait(_LOOK_S):
            pass
        return self._agent.death_cause()
