"""The Ray cluster in which an engine's processes are placed: joined, or started on this machine.

Ray is imported here alone, and only when it is used. It carries no token, step or block: actors
start processes, and those talk through the engine's own channels.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.config import ray_address_of_environment, tell_ray_to_send_no_statistics
from sidestep.ipc.ray_config import RayConfig

logger = logging.getLogger(__name__)

NAMESPACE = "sidestep"
"""Ray's namespace of the engine's actors and placement groups."""
_ANSWER_S = 10.0
"""Seconds in which a cluster must take a connection."""
OLDEST = (2, 60)
"""Oldest release of Ray that is used: older ones select no nodes by labels for bundles."""


class Node(NamedTuple):
    """A node of the cluster that lives."""

    id: str
    address: str
    resources: dict[str, float]
    """All that it has, whether in use or not."""


class RayCluster:
    """This process's connection to a Ray cluster. Any thread may call the methods."""

    def __init__(self, config: RayConfig) -> None:
        """Use the program's own connection, else join or start a cluster.

        Raises EngineStartError, and ValidationError if the program is connected elsewhere.
        """
        self.ray = import_ray()
        self._is_ours = not self.ray.is_initialized()
        if self._is_ours:
            self._connect(config.ray_address)
        elif config.ray_address not in (None, "auto", self._gcs_address):
            raise ValidationError(
                "ray_address",
                f"this program has joined the Ray cluster at {self._gcs_address} already",
            )

    def __repr__(self) -> str:
        where = self._gcs_address if self.is_joined else "left"
        return f"RayCluster({where}, by {'this' if self._is_ours else 'the program'})"

    @property
    def _gcs_address(self) -> str:
        return str(self.ray.get_runtime_context().gcs_address)

    def _connect(self, given: str | None) -> None:
        address = given or ray_address_of_environment() or "local"
        if address.startswith("ray://"):
            raise ValidationError(
                "ray_address", f"{address!r} is one of Ray Client; give the cluster's own HOST:PORT"
            )
        tell_ray_to_send_no_statistics()
        try:
            _check_answers(address)
            with _own_signals():
                self.ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            where = "be started" if address == "local" else f"be joined at {address}"
            raise EngineStartError(
                f"ray_address: no Ray cluster can {where}: {last_line(error)}"
            ) from None
        logger.info("placing replicas in the Ray cluster at %s", self._gcs_address)

    @property
    def is_joined(self) -> bool:
        """Whether the connection is there. Without it, most calls of Ray would make another."""
        return bool(self.ray.is_initialized())

    def nodes(self) -> list[Node]:
        """Return the nodes that live."""
        return [
            Node(node["NodeID"], node["NodeManagerAddress"], dict(node["Resources"]))
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here. May be called twice."""
        if self._is_ours:
            self._is_ours = False
            if self.is_joined:
                self.ray.shutdown()


def import_ray() -> Any:
    """Return Ray's module. Raises EngineStartError if it is not installed, or too old."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise EngineStartError(
            f"placer 'ray' needs Ray: pip install 'sidestep[ray]' ({error})"
        ) from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
        raise EngineStartError(
            f"placer 'ray' needs Ray {'.'.join(map(str, OLDEST))} or newer, not {ray.__version__}: "
            "pip install 'sidestep[ray]'"
        )
    return ray


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text: Ray's errors begin with traces of other processes.

    The name of the error's class comes first where the text is empty.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError if nobody listens there: Ray itself tries for some minutes."""
    if address not in ("auto", "local"):
        socket.create_connection(host_and_port(address), _ANSWER_S).close()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this program's handler of SIGTERM, which ray.init() replaces in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
