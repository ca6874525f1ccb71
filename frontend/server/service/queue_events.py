"""Queue positions, for streams that ask for them with the header `x-queue-events: 1`.

While such a stream waits, it gets events of type `queue`: `{"before": 3}`, the number of requests
that wait before it. Other clients get no such event. The server asks the engine at most once a
second, for any number of waiting streams, and the engine answers with a bounded number of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.common.errors import EngineDeadError, EngineStalledError

HEADER = "x-queue-events"
EVERY_S = 1.0
"""Shortest time between two questions to the engine, in seconds."""
_LIMIT = 64
"""Largest number of waiting requests that a replica returns."""


class QueuePosition(msgspec.Struct, omit_defaults=True):
    """Data of an event."""

    before: int
    """Number of requests that wait before it."""
    or_more: bool = False
    """Whether `before` is the largest number that the engine returns; it may be larger then."""


def asks_for_queue(http: Request, is_stream: bool) -> bool:
    """Return whether a request has the header.

    Raises ApiError for another value than 1, or without a stream.
    """
    value = http.headers.get(HEADER)
    if value not in (None, "1"):
        raise refused(HEADER, f"must be 1, not {value!r}")
    if value is not None and not is_stream:
        raise refused(HEADER, "has a meaning only for streams")
    return value is not None


class Queue:
    """Queue positions of waiting requests, for the streams that ask for them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._positions: dict[str, QueuePosition] = {}
        self._last: QueuePosition | None = None
        """Position of requests that the engine did not name, because too many wait."""
        self._asked = -EVERY_S
        self._lock = asyncio.Lock()

    async def events(
        self, stream: AsyncGenerator[bytes, None], name: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, and the request's queue positions while it waits.

        The positions come after the stream's first event, which says that the engine has taken the
        request.
        """
        told: QueuePosition | None = None
        async with aclosing(stream):
            yield await anext(stream)
            first = asyncio.ensure_future(anext(stream, None))
            try:
                while not (await asyncio.wait((first,), timeout=EVERY_S))[0]:
                    position = await self.position(name)
                    if position is not None and position != told and not first.done():
                        told = position
                        yield b"event: queue\ndata: %b\n\n" % msgspec.json.encode(position)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            if (event := first.result()) is not None:
                yield event
                async for event in stream:
                    yield event

    async def position(self, name: str) -> QueuePosition | None:
        """Return the queue position of the request with this name.

        Return None if the request does not wait, or the engine does not answer.
        """
        if not self._llm.is_waiting(name):
            return None
        async with self._lock:
            if time.monotonic() - self._asked >= EVERY_S:
                await self._ask()
        return self._positions.get(name, self._last) if self._llm.is_waiting(name) else None

    async def _ask(self) -> None:
        waiting: dict[int, list[str]] = {}
        try:
            async with asyncio.timeout(EVERY_S):
                records = await self._llm.get_request_records(_LIMIT)
        except (TimeoutError, EngineDeadError, EngineStalledError):
            records = []
        for record in records:
            if record.waiting_for is not None:
                waiting.setdefault(record.replica, []).append(record.request_id)
        self._positions = {
            name: QueuePosition(before)
            for names in waiting.values()
            for before, name in enumerate(names)
        }
        is_full = any(len(names) >= _LIMIT for names in waiting.values())
        self._last = QueuePosition(_LIMIT, or_more=True) if is_full else None
        self._asked = time.monotonic()
