"""The line from the process that started an engine to each frontend that has joined it.

It is a stream socket, and outlives the cores. The owner of the engine tells its guests of replicas
that have died, that serve again, and that stay dead; a guest tells nothing. Each end sees the other
one's end, however that comes. The socket has a name only until the guest has connected.
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


class Back(msgspec.Struct, tag=True, frozen=True):
    """A replica serves again, and has this seat for the guest."""

    seat: Seat


class Lost(msgspec.Struct, tag=True, frozen=True):
    """A replica has died, and stays dead."""

    replica: int
    cause: str


News = Down | Back | Lost
_decode = msgspec.json.Decoder(News).decode


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
        keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on: for the guest, then for the guest's end."""
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
            data = msgspec.json.encode(news) + b"\n"
            return self._socket.send(data) == len(data)
        except OSError:
            return False

    def has_ended(self) -> bool:
        """Return whether the guest has left."""
        try:
            return not self._socket.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

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
        while self.is_open:
            try:
                part = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._data += part
            self.is_open = bool(part)
        *lines, self._data = self._data.split(b"\n")
        return [_decode(line) for line in lines]

    def close(self) -> None:
        """Close the line. May be called twice."""
        self.is_open = False
        with suppress(OSError):
            self._socket.close()

    def leave_to_parent(self) -> None:
        """Close a forked process's copy."""
        self._socket.close()
