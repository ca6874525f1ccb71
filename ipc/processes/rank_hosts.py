"""Hosts that share the ranks of a replica, and the relay process that each of them but one runs.

The core runs on the first of the hosts. On each other host a relay takes the core's place: it runs
the ranks of its host and is connected to the core (executor/hosts/relay.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.processes.process import Child, spawn


@dataclass(frozen=True)
class RelayDoor:
    """The place where a relay listens for the core; sent by the relay as JSON."""

    port: int
    server_key: str
    """The public key of its socket, which the core must know; see ipc/transport/curve.py."""


@dataclass(frozen=True)
class RankHost:
    """A host, and the ranks of a replica that it runs: they follow one another."""

    name: str
    """For users."""
    address: str
    """IP address by which the replica's other hosts reach it."""
    first_rank: int
    num_ranks: int
    first_gpu: int = 0
    """Index of the first rank's GPU among those that the host's processes see."""
    relay: RelayDoor | None = None
    """None for the host of the core."""


@dataclass(frozen=True)
class RelayArgs:
    """Arguments of a relay's process, sent to it as JSON."""

    address: str
    """IP address at which it listens."""
    report: int
    """Descriptor for its RelayDoor."""


def start_relay(address: str, env: Mapping[str, str] | None = None) -> tuple[Child, RelayDoor]:
    """Start a relay that listens at an address of this host, and return it when it does.

    It serves one core, and ends with the connection, after the ranks that it has started. env:
    variables that are added to its environment. Raises EngineStartError.
    """
    reading, writing = os.pipe()
    try:
        args = RelayArgs(address, writing)
        child = spawn("relay", registry.RELAY, args, pass_fds=(writing,), env=env)
    finally:
        os.close(writing)
    with os.fdopen(reading, "rb") as report:
        told = report.read()
    if not told:
        child.stop()
        raise EngineStartError(f"a relay could not listen at {address}: {child.death_cause()}")
    return child, msgspec.json.decode(told, type=RelayDoor)


def tcp_address(address: str, port: int) -> str:
    """Return an IP address and a port as ZeroMQ and torch write them."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
