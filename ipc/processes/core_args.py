"""The arguments of an engine core process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Self

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.processes.rank_hosts import RankHost

OWNER = 0
"""Number, at its core, of the frontend that starts the core; other frontends join."""


@dataclass(frozen=True)
class Seat:
    """A new frontend's number and address at one replica's core."""

    replica: int
    client: int
    """The number by which the core knows the new frontend."""
    address: ClientAddress


@dataclass(frozen=True)
class Invitation:
    """Seats with which a program joins an engine that runs already.

    `encode` makes text of it, which is given to the program.
    """

    seats: tuple[Seat, ...]
    """One seat at each replica that serves."""
    config: EngineConfig
    line: str
    """Path of the socket at which the process that started the engine waits for the program; see
    ipc/transport/owner_line.py."""
    dead: dict[int, str] = field(default_factory=dict)
    """Number of each replica that stays dead -> the cause."""
    absent: tuple[int, ...] = ()
    """Numbers of the replicas that the load does not need now."""

    @property
    def folders(self) -> list[str]:
        """The folders of the socket files, which are gone once the program has joined."""
        folders = [folder for seat in self.seats for folder in seat.address.folders]
        return [os.path.dirname(self.line), *folders]

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


@dataclass(frozen=True)
class StartAgain:
    """How a core begins that takes the place of one that has died."""

    number: int
    """Number of this start of the replica; the first one, which is none of these, is 0."""
    delay_s: float
    """Seconds to wait before anything is started."""
    pids: tuple[int, ...]
    """The processes of the replica's last start. They must have ended: they hold the memory of the
    device."""


@dataclass(frozen=True)
class CoreArgs:
    """Arguments of the core's process, sent to it as JSON."""

    config: EngineConfig
    clients: tuple[ClientAddress, ...]
    """One address for each frontend; a message's `client` is an index into it."""
    replica: int = 0
    """Index of the data-parallel replica that it is."""
    again: StartAgain | None = None
    """None at the replica's first start."""
    black_box: int | None = None
    """Descriptor of the memory for its notes; see ipc/transport/black_box.py."""
    rank_hosts: tuple[RankHost, ...] = ()
    """The hosts of the replica's ranks, in the order of the ranks; the core's own host is the first
    one. Empty where the replicas of one host share its GPUs in their order."""
