"""Private line between a server's first process, which owns the engine, and another process.

It is an unnamed socket pair. Each side may ask the other for figures; the first process answers
with those of all processes.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec

from sidestep.frontend.server.observe.figures import Figures

_SIZE = struct.Struct("<I")


class Joined(msgspec.Struct, tag=True):
    """Message to the first process: this process has joined the engine and could serve."""


class Serve(msgspec.Struct, tag=True):
    """Message from the first process: take connections."""


class Drain(msgspec.Struct, tag=True):
    """Message from the first process: take no more requests, and end after the running ones."""


class Ask(msgspec.Struct, tag=True):
    """Question for figures."""

    call_id: int


class Tell(msgspec.Struct, tag=True):
    """Answer to a question for figures."""

    call_id: int
    figures: Figures


Word = Joined | Serve | Drain
"""Message that expects no answer."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Joined | Serve | Drain | Ask | Tell).decode


class Line:
    """One end of the line. It receives messages only while `run` runs."""

    def __init__(
        self,
        connection: socket.socket,
        figures: Callable[[], Awaitable[Figures]],
        on_word: Callable[[Word], None],
    ) -> None:
        """Make an end that is not open yet.

        figures: makes the figures for the other side's questions. on_word: gets each other message.
        """
        self._connection = connection
        self._figures = figures
        self._on_word = on_word
        self._writer: asyncio.StreamWriter | None = None
        self.opened = asyncio.Event()
        """Set once the line is open; messages before that are not sent."""
        self._calls: dict[int, asyncio.Future[Figures]] = {}
        self._call_ids = itertools.count()
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Open the line and receive messages until the other side closes it."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self.opened.set()
        try:
            while True:
                (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                self._hear(_decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writer.close()
            self._writer = None
            for task in self._answers:
                task.cancel()
            for future in self._calls.values():
                future.cancel()

    def say(self, message: Word | Ask | Tell) -> None:
        """Send a message, unless the line is closed or not open yet."""
        if self._writer is not None:
            data = _encode(message)
            self._writer.write(_SIZE.pack(len(data)) + data)

    async def ask(self, timeout_s: float) -> Figures | None:
        """Return the figures of the other side.

        Return None if it does not answer within `timeout_s` seconds, or the line is closed.
        """
        if self._writer is None:
            return None
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.say(Ask(call_id))
        try:
            await asyncio.wait((future,), timeout=timeout_s)
            return future.result() if future.done() and not future.cancelled() else None
        finally:
            del self._calls[call_id]

    def _hear(self, message: Word | Ask | Tell) -> None:
        if isinstance(message, Ask):
            task = asyncio.create_task(self._answer(message.call_id))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        elif isinstance(message, Tell):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message.figures)
        else:
            self._on_word(message)

    async def _answer(self, call_id: int) -> None:
        self.say(Tell(call_id, await self._figures()))
