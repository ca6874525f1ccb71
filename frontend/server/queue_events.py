"""The place in the queue, for streams that ask for it with the header `x-queue-events: 1`.

While such a stream waits, it gets events of type `queue`: `{"before": 3}`, the number of requests
that wait before it. Clients that do not ask never see one. The engine is asked once a second at
most, whatever number of streams wait, and answers with a bounded number of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request

from sidestep.frontend.async_llm import AsyncLLM
from sidestep.frontend.server.errors import refused
from sidestep.ipc.errors import EngineDeadError, EngineStalledError

HEADER = "x-queue-events"
EVERY_S = 1.0
_LIMIT = 64
"""Waiting requests that a replica is asked for."""


class QueuePlace(msgspec.Struct, omit_defaults=True):
    """The data of an event."""

    before: int
    or_more: bool = False
    """Whether as many are before it as the engine was asked for, so that there may be more."""


def asks_for_queue(http: Request, is_stream: bool) -> bool:
    """Return whether a request has the header. Raises ApiError for another value than 1, or without
    a stream."""
    value = http.headers.get(HEADER)
    if value not in (None, "1"):
        raise refused(HEADER, f"must be 1, not {value!r}")
    if value is not None and not is_stream:
        raise refused(HEADER, "has a meaning only for streams")
    return value is not None


class Queue:
    """What waits in the engine, as streams that wait are told of it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._places: dict[str, QueuePlace] = {}
        self._last: QueuePlace | None = None
        """Of those that the engine did not name because too many wait."""
        self._asked = -EVERY_S
        self._lock = asyncio.Lock()

    async def events(self, stream: AsyncGenerator[bytes, None],
                     name: str) -> AsyncGenerator[bytes, None]:
        """Give the events of a stream; after the first, which says that the engine has the request,
        its place in the queue while it waits."""
        told: QueuePlace | None = None
        async with aclosing(stream):
            yield await anext(stream)
            first = asyncio.ensure_future(anext(stream, None))
            try:
                while not (await asyncio.wait((first,), timeout=EVERY_S))[0]:
                    place = await self.place(name)
                    if place is not None and place != told and not first.done():
                        told = place
                        yield b"event: queue\ndata: %b\n\n" % msgspec.json.encode(place)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            if (event := first.result()) is not None:
                yield event
                async for event in stream:
                    yield event

    async def place(self, name: str) -> QueuePlace | None:
        """Return the place of the request with this name; None if it does not wait, or the engine
        does not say."""
        if not self._llm.is_waiting(name):
            return None
        async with self._lock:
            if time.monotonic() - self._asked >= EVERY_S:
                await self._ask()
        return self._places.get(name, self._last) if self._llm.is_waiting(name) else None

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
        self._places = {name: QueuePlace(before) for names in waiting.values()
                        for before, name in enumerate(names)}
        is_full = any(len(names) >= _LIMIT for names in waiting.values())
        self._last = QueuePlace(_LIMIT, or_more=True) if is_full else None
        self._asked = time.monotonic()
