"""A Ray cluster whose nodes all are on this machine, with Ray's authentication by token.

Ray reads the mode and the token when it is imported, so they are set here, and tests import Ray by
this module.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

os.environ.update(
    RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0"
)


def imported_ray() -> Any:
    """Return Ray's module. Skip the tests of a module that calls it where Ray is not installed."""
    return pytest.importorskip("ray")


class Nodes:
    """The nodes of a cluster; each has one CPU unless it is given others."""

    def __init__(self, number: int, **options: Any) -> None:
        """Start the cluster. number: of nodes. options: of each node, as of `ray start`."""
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        self._options = {"num_cpus": 1, "include_dashboard": False, **options}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=self._options)
        self._number = 0
        self._others = [self._start() for _ in range(number - 1)]

    @property
    def address(self) -> str:
        """The address by which programs join."""
        return str(self._cluster.address)

    def _start(self) -> Any:
        """Start a node with an address of its own: a program joins the node of its own address."""
        self._number += 1
        address = f"127.0.0.{1 + self._number}"
        return self._cluster.add_node(node_ip_address=address, **self._options)

    def add(self) -> None:
        """Add a node."""
        self._others.append(self._start())

    def remove(self) -> None:
        """Kill all processes of the node that was added last, at once."""
        self._cluster.remove_node(self._others.pop(), allow_graceful=False)

    def close(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


@contextmanager
def ray_nodes(number: int, **options: Any) -> Iterator[Nodes]:
    """Start a cluster that only programs of this process and its children can join.

    Programs that are started meanwhile join it by default.
    """
    with pytest.MonkeyPatch.context() as patch:
        nodes = Nodes(number, **options)
        patch.setenv("RAY_ADDRESS", nodes.address)
        try:
            yield nodes
        finally:
            nodes.close()
            with suppress(FileNotFoundError):  # other programs would take it for one that runs
                os.remove("/tmp/ray/ray_current_cluster")
