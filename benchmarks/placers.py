"""Hosts for benchmarks: every placer finds its hosts on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLACERS = ("local", "join", "ray")


@contextmanager
def placed(placer: str, replicas: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the options of an engine whose replicas have a host each, by this placer."""
    if placer == "ray":
        with _ray_nodes(replicas) as address:
            yield {"placer": placer, "ray_address": address}
    elif placer == "join":
        with _joining_nodes(replicas) as options:
            yield {"placer": placer, **options}
    else:
        yield {}


@contextmanager
def _joining_nodes(number: int) -> Iterator[dict[str, Any]]:
    """Run `sidestep node` for each host; they wait for the head, and end with it."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        head = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        invitation = str(Path(folder, "invitation"))
        command = [sys.executable, "-m", "sidestep", "node", "--head", head]
        nodes = [
            subprocess.Popen(
                [*command, "--invitation", invitation, "--address", f"127.0.0.{2 + index}"]
            )
            for index in range(number)
        ]
        try:
            yield {"head_address": head, "invitation_file": invitation}
        finally:
            for node in nodes:
                node.terminate()
                node.wait()


@contextmanager
def _ray_nodes(number: int) -> Iterator[str]:
    """Start a Ray cluster of nodes with a CPU each, and yield its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for index in range(number - 1):
            cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{2 + index}")
        yield str(cluster.address)
    finally:
        cluster.shutdown()
