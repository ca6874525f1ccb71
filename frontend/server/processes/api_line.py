"""The private line between a server's first process, which owns the engine, and another one: an
unnamed socket pair.

Either side may ask the other for figures; the first process answers with those of all.
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
    """To the first process: the engine has taken this one; it could serve."""


class Serve(msgspec.Struct, tag=True):
    """From the first process: take connections."""


class Drain(msgspec.Struct, tag=True):
    """From the first process: take no more requests, and end when those that run have ended."""


class Ask(msgspec.Struct, tag=True):
    """For figures."""

    call_id: int


class Tell(msgspec.Struct, tag=True):
    """The answer."""

    call_id: int
    figures: Figures


Word = Joined | Serve | Drain
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Joined | Serve | Drain | Ask | Tell).decode


class Line:
    """One end. `run` must run for anything to be heard."""

    def __init__(
        self,
        connection: socket.socket,
        figures: Callable[[], Awaitable[Figures]],
        on_word: Callable[[Word], None],
    ) -> None:
        """figures: what the other side is told when it asks."""
        self._connection = connection
        self._figures = figures
        self._on_word = on_word
        self._writer: asyncio.StreamWriter | None = None
        self.opened = asyncio.Event()
        """From here on what is said is sent."""
        self._calls: dict[int, asyncio.Future[Figures]] = {}
        self._call_ids = itertools.count()
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the other side has gone."""
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
        """Sends; whoever has gone hears nothing."""
        if self._writer is not None:
            data = _encode(message)
            self._writer.write(_SIZE.pack(len(data)) + data)

    async def ask(self, timeout_s: float) -> Figures | None:
        """The other side's figures; None if it does not answer in time, or has gone."""
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
