"""uvicorn's HTTP protocol with bounds on what comes before a body: the size of the headers, and the time they take."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_MAX_HEAD = 64 << 10
"""Bytes of a request's target and headers."""


WRITER = "sidestep.writer"
"""Where in a request's scope its `BodyWriter` is."""


class BodyWriter:
    """Writes pieces of a chunked body without a task: for streams whose pieces come from a callback."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        """Whether the client takes what is written: the answer's head is out, and not too much waits to be sent."""
        cycle = self._cycle
        return bool(not self._flow.write_paused and cycle.chunked_encoding and not cycle.disconnected)

    def write(self, body: bytes) -> None:
        """One piece; not empty. Only when ready."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout = 30.0
    """Seconds from the connection, or a request's first byte, to the end of its headers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_size = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[WRITER] = BodyWriter(self.cycle)

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _MAX_HEAD:
            raise ValueError("the headers are too large")  # the parser makes a 400 of it

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.close()
