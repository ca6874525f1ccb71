"""uvicorn's HTTP protocol with bounds on what comes before a body: the size of the headers, and the
time they take.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)
_MAX_HEAD = 64 << 10
"""Bytes of a request's target and headers."""


_LAST_FILES = 4
"""Number of descriptors below the limit. The system gives the lowest free descriptor, so one of
these shows that no more are free."""
_SAY_AGAIN_S = 60.0
WRITER = "sidestep.writer"
"""Where in a request's scope its `BodyWriter` is."""


class BodyWriter:
    """Writes pieces of a chunked body without a task: for streams whose pieces come from a
    callback.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        """Whether the client takes what is written: the answer's head is out, and not too much
        waits to be sent.
        """
        cycle = self._cycle
        return bool(
            not self._flow.write_paused and cycle.chunked_encoding and not cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        """One piece; not empty. Only when ready."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows them: each
    connection is one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system may have a limit that it reports as infinite
        logger.warning("the limit on open files could not be raised to %d", hard)


class FileWatch:
    """Log a warning when the process can open no more files. The event loop then closes further
    connections silently.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = -math.inf

    def opened(self, descriptor: int) -> None:
        """Check the descriptor of a new connection."""
        limit, now = resource.getrlimit(resource.RLIMIT_NOFILE)[0], self._clock()
        if descriptor >= limit - _LAST_FILES and now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            logger.warning(
                "the limit on open files (%d) is reached: further connections are closed at once; "
                "raise the hard limit (ulimit -Hn)",
                limit,
            )


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_timeout = 30.0
    """Seconds from the connection, or a request's first byte, to the end of its headers."""
    files: FileWatch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_size = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.files is not None:
            self.files.opened(transport.get_extra_info("socket").fileno())
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
