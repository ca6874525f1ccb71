"""HTTP protocol of uvicorn with bounds on the size of the headers and on the time they take."""

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
"""Largest number of bytes of a request's target and headers."""
_LAST_FILES = 4
"""Number of descriptors below the limit. The system gives the lowest free descriptor, so one of
these shows that no more are free."""
_SAY_AGAIN_S = 60.0
"""Shortest time between two warnings, in seconds."""
WRITER = "sidestep.writer"
"""Key of a request's scope: its `BodyWriter`."""


class BodyWriter:
    """Writer of a chunked body, without a task, for streams whose pieces come from a callback."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        """Return whether a piece can be written.

        The answer's head must have been sent, and not too much data may wait to be sent.
        """
        cycle = self._cycle
        return bool(
            not self._flow.write_paused and cycle.chunked_encoding and not cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        """Write one piece, which is not empty. The writer must be ready."""
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system allows.

    Each connection is one open file.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system may have a limit that it reports as infinite
        logger.warning("the limit on open files could not be raised to %d", hard)


class FileWatch:
    """Watch that logs a warning when the process can open no more files.

    The event loop then closes further connections silently.
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
    """HTTP protocol of one connection."""

    head_timeout = 30.0
    """Most seconds from the connection, or a request's first byte, to the end of its headers."""
    files: FileWatch | None = None
    """Watch that checks each new connection's descriptor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_size = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, whose first request's headers must come in time."""
        super().connection_made(transport)
        if self.files is not None:
            self.files.opened(transport.get_extra_info("socket").fileno())
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin a request, whose headers must come in time."""
        super().on_message_begin()
        self._head_size = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target. Raises ValueError if the head is too large."""
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Raises ValueError if the head is too large."""
        self._grow(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head of a request, and put a `BodyWriter` into its scope."""
        self._stop_waiting()
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[WRITER] = BodyWriter(self.cycle)

    def _grow(self, size: int) -> None:
        self._head_size += size
        if self._head_size > _MAX_HEAD:
            raise ValueError("the headers are too large")  # the parser answers with 400

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
