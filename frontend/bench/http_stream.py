"""A client of HTTP for loads.

A client must cost far less for each event than the server. httpx2 took 180 us an event, this one
takes 20 (docs/performance.md). Each request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from sidestep.ipc.common.errors import RequestError, ValidationError

_SHOWN = 200
"""Characters that are shown of an answer that is an error."""
_BUSY = (429, 503)
"""Statuses of servers that have no room, or end."""


class BusyError(RequestError):
    """A server that has no room now has said when to ask again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HttpServer:
    """The server that requests go to."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Check a URL and a key; raises ValidationError if one is not valid."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValidationError("url", f"{url!r}: {error}") from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not _is_one_word(url)
            or parts.username is not None
            or parts.query
            or parts.fragment
        ):
            raise ValidationError(
                "url", f"{url!r} is not http://HOST:PORT or https://HOST:PORT, and a path at most"
            )
        if api_key is not None and not _is_one_word(api_key):
            raise ValidationError("api_key", "must be of ASCII characters other than spaces")
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        # The routes' paths begin with /v1; people write it in the URL too.
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._headers = f"Host: {parts.netloc}\r\n{key}Connection: close\r\n"

    async def get(self, path: str) -> bytes:
        """Return the body at a path; raises RequestError."""
        parts: list[bytes] = []
        await self.request("GET", path, b"", parts.append)
        return b"".join(parts)

    async def request(
        self, method: str, path: str, body: bytes, receive: Callable[[bytes], None]
    ) -> None:
        """Send `body`, which is JSON, and pass the answer's body to `receive`.

        The body is passed in parts as they come. Raises RequestError for an answer that is not 200
        or breaks off, BusyError for one with Retry-After; and what `receive` raises.
        """
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n"
        answer = _Answer(receive)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(
                lambda: answer, self._host, self._port, ssl=self._tls
            )
        except (OSError, UnicodeError) as error:
            raise RequestError(f"no connection to {self.url}: {error}") from None
        try:
            transport.write(head.encode() + body)
            await answer.done
        finally:
            transport.close()
        if answer.status != 200:
            message = f"{answer.status}: {answer.refusal.decode(errors='replace')[:_SHOWN]}"
            if answer.status in _BUSY and answer.retry_after_s is not None:
                raise BusyError(message, answer.retry_after_s)
            raise RequestError(message)


class _Answer(asyncio.Protocol):
    """The protocol that reads an answer.

    It processes the answer where it reads it: waking a task for each event would cost as much
    again. The parser calls the methods that begin with on_.
    """

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.refusal = b""
        """The body of an answer that is not 200."""
        self.retry_after_s: float | None = None
        """Seconds that the header Retry-After gives."""
        self._receive = receive
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._says_its_end = False
        self._complete = False

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
            if self._parts:
                part = b"".join(self._parts)
                self._parts.clear()
                if self.status == 200:
                    self._receive(part)
                else:
                    self.refusal += part
        except (HttpParserError, HttpParserUpgrade) as error:
            self.done.set_exception(RequestError(f"the answer broke off: {error}"))
        except Exception as error:
            self.done.set_exception(error)
        else:
            if self._complete:
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None and self.status != 0 and not self._says_its_end:
            self.done.set_result(None)  # the answer ends with the connection
        else:
            self.done.set_exception(
                RequestError(f"the answer broke off: {error or 'the connection was closed'}")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._says_its_end |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"retry-after" and value.strip().isdigit():
            self.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete = self.status != 0  # an answer of 1xx comes before the final one


def _is_one_word(text: str) -> bool:
    """Return whether a text may be part of a request's head."""
    return text.isascii() and text.isprintable() and " " not in text
