"""The placer `join`, which starts cores on the hosts that have joined by `sidestep node`."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from sidestep.frontend.placement.head import Head
from sidestep.frontend.placement.placer import HostStatus, PlacedCore, Placer
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.config import EngineConfig, state_folder_of_environment
from sidestep.ipc.hosts.node_messages import NodeInvitation, keys_of_file
from sidestep.ipc.processes.addresses import ClientAddress, new_remote_address
from sidestep.ipc.processes.core_args import CoreArgs

logger = logging.getLogger(__name__)


class JoinPlacer(Placer):
    """Listens for agents, and gives cores to them."""

    def __init__(self, config: EngineConfig) -> None:
        """Listen to nobody yet."""
        super().__init__(config)
        self._head: Head | None = None
        self._file: Path | None = None

    def begin(self) -> None:
        """Listen for agents, and write the invitation that they need if they do not share a key."""
        host, port = self.listening()
        self._head = self.make_head(host, port)
        if self.config.placement.head_key_file is None:
            self.publish(self._head.invitation)

    def make_head(self, host: str, port: int) -> Head:
        """Return a head that listens there. Raises EngineStartError."""
        file = self.config.placement.head_key_file
        keys = None if file is None else keys_of_file(file)
        return Head(host, port, self.config.placement.placer_timeout, keys)

    def listening(self) -> tuple[str, int]:
        """Return the numeric address and the port of this machine at which others reach it.

        Raises EngineStartError.
        """
        assert self.config.placement.head_address is not None, "the options are checked"
        host, port = host_and_port(self.config.placement.head_address)
        return numeric_host(host), port

    def publish(self, invitation: NodeInvitation) -> None:
        """Write the invitation to a file for this user alone. Raises EngineStartError."""
        self._file = invitation_path(invitation.head, self.config.placement.invitation_file)
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_secret(self._file, invitation.encode())
        except OSError as error:
            raise EngineStartError(f"invitation_file: cannot be written: {error}") from None
        logger.warning(
            "hosts join by: sidestep node --head %s --invitation %s", invitation.head, self._file
        )

    @property
    def head(self) -> Head:
        """The head that `begin` has made."""
        assert self._head is not None, "begin() comes first"
        return self._head

    def new_address(self) -> ClientAddress:
        """Return two ports with a key of their own."""
        try:
            return new_remote_address(self.listening()[0])
        except OSError as error:
            raise EngineStartError(f"head_address: cannot listen: {error}") from None

    def place(self, args: CoreArgs) -> PlacedCore:
        """Start a core on the host with the fewest cores, as soon as one has room."""
        return self.head.place(args)

    @property
    def hosts(self) -> list[HostStatus]:
        """The hosts that have joined and have not gone."""
        return [] if self._head is None else self._head.hosts

    @property
    def num_refused(self) -> int:
        """Peers without the key that have been refused."""
        return 0 if self._head is None else self._head.num_refused

    def close(self) -> None:
        """Let all hosts go, and remove the invitation."""
        if self._head is not None:
            self._head.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def numeric_host(name: str) -> str:
    """Return the numeric IPv4 address of a host. Raises EngineStartError."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        return str(found[0][4][0])
    except OSError as error:
        raise EngineStartError(f"{name} is no host: {error}") from None


def invitation_path(head: str, given: str | None) -> Path:
    """Return the path of the invitation of a head. given: the option. Raises EngineStartError."""
    if given is not None:
        return Path(given)
    state = state_folder_of_environment()
    if state is None:
        raise EngineStartError("invitation_file: must be given, since this user has no home folder")
    return state / f"invitation-{host_and_port(head)[1]}.json"


def write_secret(path: Path, text: str) -> None:
    """Write a file that its owner alone can read; others see it whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text + "\n")
    new.replace(path)
