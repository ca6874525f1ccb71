"""Messages between the head, which places an engine's processes, and the agents on other hosts.

The head is the frontend that starts the engine. An agent (`sidestep node`) says what its host has,
carries out orders, and reports ends. Messages are msgspec structs, tagged and array-like.
"""

from __future__ import annotations

from importlib import metadata
from typing import Self

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.transport.black_box import Recorded
from sidestep.ipc.transport.curve import CurveKeys, keys_of_secret

BEAT_S = 1.0
"""Seconds between two heartbeats, which go both ways."""
LEAST_SECRET = 32
"""Characters that a secret text has at least."""
MOST_MISSES = 3
"""Heartbeats in a row that may be missing; after that the other side has gone."""


def own_version() -> str:
    """Return the version of Sidestep that runs here."""
    return metadata.version("sidestep")


class NodeInvitation(msgspec.Struct, frozen=True, kw_only=True):
    """All that an agent needs to reach the head, as the text of a file for its owner alone."""

    head: str
    """HOST:PORT at which the head listens."""
    server_key: str
    """The head's public key as Z85 text. It is a secret: who knows it may be a node."""

    def encode(self) -> str:
        """Return the invitation as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the invitation in a text of `encode`. Raises ValidationError for other text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValidationError("invitation", str(error)) from None


def keys_of_file(path: str) -> CurveKeys:
    """Return the keys of a head from a file that hosts share. Raises ValidationError.

    The file's text is the secret, without white space around it.
    """
    try:
        with open(path) as file:
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError("head_key_file", str(error)) from None
    if len(text) < LEAST_SECRET:
        raise ValidationError("head_key_file", f"{path} has less than {LEAST_SECRET} characters")
    return keys_of_secret(text)


# Agent to head.


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A host that offers itself; the agent's first message."""

    name: str
    address: str
    """The address by which other hosts reach it."""
    version: str
    """The version of Sidestep, which must be the head's."""
    boot: str
    """Text that tells this start of the machine from all others; process ids are valid in it."""
    num_cores: int
    gpus: list[str]
    """The GPUs that it offers, as names for CUDA_VISIBLE_DEVICES."""
    max_replicas: int
    """Most replicas that may have ranks there at once."""
    max_ranks: int | None = None
    """Most ranks that may run there at once; None for no limit but its GPUs."""


class NodeBeat(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The agent lives. It answers each beat of the head at once."""

    sent_ns: int
    """The time in the head's beat."""
    now_ns: int
    """The agent's monotonic time at the answer."""
    computing: list[int] = []
    """Cores whose workers have used CPU time since the last beat."""


class CoreEnded(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A core has ended, or could not be started."""

    core: int
    cause: str
    now_ns: int
    """The agent's monotonic time, of which the notes' times are."""
    notes: Recorded | None = None
    """The notes of the core; None if it has not run."""


class RelayStarted(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A relay listens for the core whose ranks it will run."""

    relay: int
    port: int
    server_key: str


class RelayEnded(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A relay has ended after its ranks, or could not be started."""

    relay: int
    cause: str


FromNode = Hello | NodeBeat | CoreEnded | RelayStarted | RelayEnded


# Head to agent.


class HeadBeat(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The head lives."""

    sent_ns: int
    """The head's monotonic time."""


class Leave(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The head needs this host no more, or cannot use it; the agent ends."""

    reason: str
    is_error: bool


class StartCore(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """Start a core."""

    core: int
    """Number of this start, which no other start of the head has."""
    args: CoreArgs
    gpus: list[str] | None = None
    """The GPUs that the core's workers may see; None for all."""


class EndCore(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """Let a core end by its lifeline, or kill it with its workers if it hangs."""

    core: int
    kills: bool = False
    worker_pids: list[int] = []
    """The workers to kill first."""


class WatchWorkers(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """Say from now on whether these workers of a core compute on a CPU."""

    core: int
    worker_pids: list[int]


class StartRelay(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """Start a relay for ranks of a core that another host will have."""

    relay: int
    """Number of this start, which no other start of a core or relay has."""
    gpus: list[str] | None = None
    """The GPUs that its ranks may see; None for all."""


class EndRelay(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """End a relay with its ranks: its core has ended, or will not come."""

    relay: int


ToNode = HeadBeat | Leave | StartCore | EndCore | WatchWorkers | StartRelay | EndRelay

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def encode_node_message(message: ToNode | FromNode) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_to_node(data: bytes) -> ToNode:
    """Return the head's message. Raises msgspec.DecodeError (a ValueError) for other bytes."""
    return _to_node.decode(data)


def decode_from_node(data: bytes) -> FromNode:
    """Return an agent's message. Raises msgspec.DecodeError (a ValueError) for other bytes."""
    return _from_node.decode(data)
