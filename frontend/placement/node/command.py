"""`sidestep node`, which lends this host to an engine that runs on another."""

from __future__ import annotations

import argparse
import signal
import socket
import time
from pathlib import Path
from types import FrameType

import msgspec

from sidestep.frontend.options.node_options import NodeOptions
from sidestep.frontend.options.option_flags import option_values
from sidestep.frontend.placement.join import invitation_path, numeric_host
from sidestep.frontend.placement.node.agent import Agent
from sidestep.frontend.placement.node.node_args import NodeArgs
from sidestep.frontend.planning.machine import gpu_indices
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.logs import own_process
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.config import visible_gpus_of_environment
from sidestep.ipc.hosts.node_messages import NodeInvitation, keys_of_file
from sidestep.ipc.processes.addresses import with_port

_LOOK_S = 0.2
"""Seconds between two looks for the invitation's file, and for the head's name."""


def run_node(parsed: argparse.Namespace) -> int:
    """Run `sidestep node` and return its exit status: 1 if the head has gone without a word."""
    options = NodeOptions(**option_values(parsed, NodeOptions))
    own_process()
    signal.signal(signal.SIGTERM, _leave)
    until = time.monotonic() + options.wait
    invitation = _invitation(options, until)
    host, port = host_and_port(options.head or invitation.head)
    gpus = tuple(visible_gpus() if options.gpus is None else options.gpus)
    head = with_port(_found(host, until), port)
    agent = Agent(
        NodeArgs(
            invitation=msgspec.structs.replace(invitation, head=head),
            name=options.name or socket.gethostname(),
            address=options.address,
            gpus=gpus,
            max_replicas=options.max_replicas or max(1, len(gpus)),
            max_ranks=options.max_ranks,
            wait_s=max(0.0, until - time.monotonic()),
        )
    )
    return agent.run()


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that programs on this host may see."""
    visible = visible_gpus_of_environment()
    return gpu_indices() if visible is None else visible


def _invitation(options: NodeOptions, until: float) -> NodeInvitation:
    """Return the invitation that the options name. Raises ValidationError, EngineStartError."""
    if options.head_key_file is not None:
        key = keys_of_file(options.head_key_file).public
        return NodeInvitation(head=options.head or "", server_key=key)
    return _read(invitation_path(options.head or "", options.invitation), until)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _read(path: Path, until: float) -> NodeInvitation:
    """Return the invitation in a file, which the head may write later. Raises EngineStartError."""
    while not path.exists():
        if time.monotonic() > until:
            raise EngineStartError(f"invitation: there is no file {path}")
        time.sleep(_LOOK_S)
    try:
        return NodeInvitation.decode(path.read_text())
    except OSError as error:
        raise EngineStartError(f"invitation: {error}") from None


def _found(host: str, until: float) -> str:
    """Return the numeric address of a host whose name may be known later."""
    while True:
        try:
            return numeric_host(host)
        except EngineStartError:
            if time.monotonic() > until:
                raise
        time.sleep(_LOOK_S)
