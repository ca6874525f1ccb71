"""The line from the process that started an engine to each frontend that has joined it.

It is a stream socket, and outlives the cores. The owner of the engine tells its guests of replicas
that have died, that serve again, and that stay dead, and which suspects of a death may run. A guest
tells which of its requests are suspects, which have passed, which cores do not answer it, and its
load. Each
end sees the other one's end, however that comes. The socket has a name only until the guest has
connected.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress

import msgspec

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.processes.core_args import Seat
from sidestep.ipc.processes.forking import keep_from_children


class Down(msgspec.Struct, tag=True, frozen=True):
    """A replica has died, and is being started again."""

    replica: int
    cause: str
    of_host: bool = False
    """Whether its host has gone, so that no request is the cause."""


class Back(msgspec.Struct, tag=True, frozen=True):
    """A replica serves again, and has this seat for the guest."""

    seat: Seat


class Lost(msgspec.Struct, tag=True, frozen=True):
    """A replica has died, and stays dead."""

    replica: int
    cause: str


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """A replica is to leave: nothing new may go there, and what runs there goes on."""

    replica: int
    at_once: bool = False
    """Whether what runs there must go on elsewhere."""


class Left(msgspec.Struct, tag=True, frozen=True):
    """A replica has left the engine, without a fault."""

    replica: int


Path = tuple[int, ...]
"""The name of a suspect for a frontend: the numbers of the guests on the way to the suspect's own
frontend, then the handle of its first choice there."""


class Claimed(msgspec.Struct, tag=True, frozen=True):
    """A replica is kept for suspects from now on, or none is. A guest answers with Suspected."""

    number: int
    replica: int | None
    ends_turn: bool
    """Whether suspects that had their turn and have not begun must wait for another one."""


class Turn(msgspec.Struct, tag=True, frozen=True):
    """These suspects may run on the replica that is kept for them."""

    suspects: list[Path]


class Parked(msgspec.Struct, tag=True, frozen=True):
    """These requests have passed, and must leave the replica that is kept for suspects."""

    suspects: list[Path]


class Blamed(msgspec.Struct, tag=True, frozen=True):
    """This suspect has run alone at a death, and ends."""

    suspect: Path
    cause: str


News = Down | Back | Lost | Leaving | Left | Claimed | Turn | Parked | Blamed
_decode = msgspec.json.Decoder(News).decode


class Suspected(msgspec.Struct, tag=True, frozen=True):
    """The requests that had begun at a death, each with its replica, since the last such report.

    The guest has seen all deaths that came before the message that it answers.
    """

    number: int
    """The number of the claim that it answers."""
    suspects: list[tuple[int, Path]]


class Passed(msgspec.Struct, tag=True, frozen=True):
    """These requests are suspects no more: they have given tokens, or ended."""

    suspects: list[Path]


class Silent(msgspec.Struct, tag=True, frozen=True):
    """The core of a replica does not answer the guest."""

    replica: int


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The load of the guest, and of the frontends that it has invited."""

    forecast_s: float
    """Seconds until the first token of a request that comes now."""
    running: int
    """Sequences that have not ended."""


Reports = Suspected | Passed | Silent | Loaded
_decode_report = msgspec.json.Decoder(Reports).decode


def line_path() -> str:
    """Return the path of a new line, in a private folder of its own."""
    return os.path.join(tempfile.mkdtemp(prefix="sidestep-"), "line")


def remove_line(path: str) -> None:
    """Remove the socket's file, if it is still there. A connection goes on."""
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


class OwnerEnd:
    """The owner's end, which waits for one guest."""

    def __init__(self) -> None:
        self.path = line_path()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._socket.listen(1)
        self.is_connected = False
        """Whether the guest has come."""
        self.is_open = True
        """Whether the guest may still come, or has not ended."""
        self._data = b""
        keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on: for the guest, then for its reports and its end."""
        return self._socket.fileno()

    def accept(self) -> None:
        """Take the guest's connection, which has another descriptor."""
        listener = self._socket
        self._socket, _ = listener.accept()
        self._socket.setblocking(False)
        listener.close()
        remove_line(self.path)
        self.is_connected = True

    def tell(self, news: News) -> bool:
        """Send news, and return whether the guest can have them."""
        try:
            _send(self._socket, news)
        except OSError:
            return False
        return True

    def receive(self) -> list[Reports]:
        """Return the reports that have come. `is_open` is false once the guest has ended."""
        lines, self._data, self.is_open = _read_lines(self._socket, self._data)
        return [_decode_report(line) for line in lines]

    def close(self) -> None:
        """Close the line. May be called twice."""
        self.is_open = False
        self._socket.close()
        remove_line(self.path)

    def leave_to_parent(self) -> None:
        """Close a forked process's copy."""
        self._socket.close()


class GuestEnd:
    """A guest's end."""

    def __init__(self, path: str) -> None:
        """Connect. Raises EngineStartError if nobody waits for this guest any more."""
        self._socket = socket.socket(socket.AF_UNIX)
        self.is_open = True
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise EngineStartError(
                "the engine that sent the invitation has ended, or it was used before"
            ) from None
        remove_line(path)
        self._socket.setblocking(False)
        self._data = b""
        keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` may have something."""
        return self._socket.fileno()

    def receive(self) -> list[News]:
        """Return the news that have come. `is_open` is false once the owner has ended."""
        if not self.is_open:
            return []
        lines, self._data, self.is_open = _read_lines(self._socket, self._data)
        return [_decode(line) for line in lines]

    def tell(self, report: Reports) -> None:
        """Send a report. Nothing happens once the owner has ended."""
        with suppress(OSError):
            _send(self._socket, report)

    def close(self) -> None:
        """Close the line. May be called twice."""
        self.is_open = False
        with suppress(OSError):
            self._socket.close()

    def leave_to_parent(self) -> None:
        """Close a forked process's copy."""
        self._socket.close()


def _send(line: socket.socket, message: News | Reports) -> None:
    """Send a message whole. Raises OSError when the other end does not read."""
    data = msgspec.json.encode(message) + b"\n"
    if line.send(data) != len(data):
        line.close()  # half a message cannot be followed by another
        raise OSError("the other end of the line does not read")


def _read_lines(line: socket.socket, data: bytes) -> tuple[list[bytes], bytes, bool]:
    """Return the lines that have come, the beginning of the next, and whether the line is open.

    data: the beginning of the first line.
    """
    is_open = True
    while is_open:
        try:
            part = line.recv(1 << 16)
        except BlockingIOError:
            break
        except OSError:
            part = b""
        data += part
        is_open = bool(part)
    *lines, data = data.split(b"\n")
    return lines, data, is_open
