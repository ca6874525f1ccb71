"""The addresses at which frontends listen for cores: socket files, or TCP ports with keys.

An address is made before anything listens there, so it can be given to a core and to a frontend in
any order. No other program can take it: the folder of the files is private, and a socket keeps each
port until the address is removed.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from typing import Self

import zmq

from sidestep.ipc.common.options import host_and_port
from sidestep.ipc.processes.forking import keep_from_children


@dataclass(frozen=True)
class ClientAddress:
    """The addresses at which one frontend listens: it binds both ends, the core connects."""

    to_core: str
    from_core: str
    server_key: str | None = field(default=None, repr=False)
    """The public key that the core must know, as z85 text; None for socket files."""
    secret_key: str | None = field(default=None, repr=False)
    """The key of the frontend that listens; the core does not get it."""

    @property
    def is_remote(self) -> bool:
        """Whether the core may run on another host."""
        return self.server_key is not None

    @property
    def for_core(self) -> Self:
        """The part of the address that a core may know."""
        return replace(self, secret_key=None)

    @property
    def folders(self) -> list[str]:
        """The folder that holds the socket files, and nothing else; none for ports."""
        return [] if self.is_remote else [os.path.dirname(self.to_core.removeprefix("ipc://"))]

    @property
    def bound(self) -> set[str | tuple[str, int]]:
        """The addresses of its listening sockets, as the system knows them."""
        ends = (self.to_core, self.from_core)
        if self.is_remote:
            return {host_and_port(end.removeprefix("tcp://")) for end in ends}
        return {end.removeprefix("ipc://") for end in ends}


class _Reserved:
    """Two ports that nothing else on this machine is given."""

    def __init__(self, host: str) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(2):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._sockets.append(socket.socket(family))
                # A listener with this option, which ZeroMQ sets too, may share a port with a
                # socket that does not listen.
                self._sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._sockets[-1].bind((host, 0))
        except OSError:
            self.leave_to_parent()
            raise
        keep_from_children(self)

    @property
    def ports(self) -> list[int]:
        """The numbers of the ports."""
        return [each.getsockname()[1] for each in self._sockets]

    def leave_to_parent(self) -> None:
        """Close the sockets of this process."""
        for each in self._sockets:
            each.close()


_reserved: dict[ClientAddress, _Reserved] = {}
"""The ports of the addresses that this process has made and not removed."""


def new_address() -> ClientAddress:
    """Return an address in a private folder of its own.

    The folder has mode 0700, so that no other user can talk to the engine.
    """
    folder = tempfile.mkdtemp(prefix="sidestep-")
    return ClientAddress(
        to_core=f"ipc://{folder}/{uuid.uuid4().hex[:8]}",
        from_core=f"ipc://{folder}/{uuid.uuid4().hex[:8]}",
    )


def new_remote_address(host: str) -> ClientAddress:
    """Return an address with two ports of this machine and a fresh key.

    host: the numeric address by which cores reach this machine. Raises OSError.
    """
    reserved = _Reserved(host)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    to_core, from_core = (tcp_address(host, port) for port in reserved.ports)
    address = ClientAddress(to_core, from_core, public, secret)
    _reserved[address] = reserved
    return address


def remove_address(address: ClientAddress) -> None:
    """Remove the socket files, or free the ports. Connections that are made already go on."""
    for folder in address.folders:
        shutil.rmtree(folder, ignore_errors=True)
    if (reserved := _reserved.pop(address, None)) is not None:
        reserved.leave_to_parent()


def tcp_address(host: str, port: int) -> str:
    """Return the address in the form that ZeroMQ takes."""
    return f"tcp://{with_port(host, port)}"


def with_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
