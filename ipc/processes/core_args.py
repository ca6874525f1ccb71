"""What an engine core process is started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import EngineConfig


@dataclass(frozen=True)
class ClientAddress:
    """Where one frontend listens: it binds both ends, the core connects."""

    to_core: str
    from_core: str

    @property
    def folder(self) -> str:
        """The folder that holds the socket files, and nothing else."""
        return os.path.dirname(self.to_core.removeprefix("ipc://"))


@dataclass(frozen=True)
class Seat:
    """A newcomer's place at one replica's core."""

    replica: int
    client: int
    """The number that the core knows the newcomer by."""
    address: ClientAddress


@dataclass(frozen=True)
class Invitation:
    """With it a program joins an engine that runs already. `encode` makes text of it, to be handed
    to the program.
    """

    seats: tuple[Seat, ...]
    """At each replica that lives."""
    config: EngineConfig

    @property
    def folders(self) -> list[str]:
        """The folders of the seats' socket files, which are gone once the program has joined."""
        return [seat.address.folder for seat in self.seats]

    def encode(self) -> str:
        """JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` made. Raises ValidationError for anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValidationError("invitation", str(error)) from None


@dataclass(frozen=True)
class CoreArgs:
    """Sent to the core's process as JSON."""

    config: EngineConfig
    clients: tuple[ClientAddress, ...]
    """One for each frontend; a message's `client` is an index into it."""
    replica: int = 0
    """Which of the config's data-parallel replicas it is."""
