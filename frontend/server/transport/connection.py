"""Send answers to clients.

Work for a client is cancelled when the client goes away. The events of a stream are sent as they
come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidestep.frontend.server.transport.errors import ApiError, ClientGoneError, as_api_error
from sidestep.frontend.server.transport.lines import encode_line

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
"""Last event of a stream."""
RAW_SEND = "sidestep.send"
"""Key of a request's scope: the server's own `send`.

The layers that wrap it need only an answer's beginning, and would cost as much for each token as
the token's event."""
_MOST_READY = 256
"""Largest number of events of several choices that wait to be sent together."""
_AT_ONCE_S = 0.25
"""Seconds in which an engine that refuses a request normally does so.

The answer then has an error status."""
_COMMENT = b": waiting\n\n"
"""A comment, which readers of events ignore. It shows proxies that the connection is in use."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`, or raise its error.

    When the client goes away, cancel the work and raise ClientGoneError.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _just(event: bytes) -> bytes:
    return event


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_event(error: ApiError) -> bytes:
    return b"data: %b\n\n%b" % (encode_line(error.body), DONE)


class EventStream(Response):
    """Answer that is a stream of server-sent events.

    An error before the engine has taken the request, or at once after that, becomes an answer with
    an error status. Comments are sent until the first event is there.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        encode_error: Callable[[ApiError], bytes] | None = None,
        *,
        comment_s: float,
    ) -> None:
        """Begin a stream.

        events: whole events, one or several at a time; the first, empty one says that the engine
        has taken the request. encode_error: makes the last event of a stream that fails. comment_s:
        seconds between comments; 0: none.
        """
        super().__init__(headers={**_STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]  # the length of an empty body
        self._events = events
        self._encode_error = encode_error or _error_event
        self._comment_s = comment_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end, or until the client goes away. Raises ApiError."""
        try:
            await while_connected(self._send(send, scope.get(RAW_SEND, send)), receive)
        except ClientGoneError:
            pass

    async def _send(self, send: Send, send_body: Send) -> None:
        async def put(event: bytes) -> None:
            await send_body({"type": "http.response.body", "body": event, "more_body": True})

        async with aclosing(self._events) as events:
            try:
                taken = await anext(events)
            except Exception as error:
                raise as_api_error(error) from error
            first = asyncio.ensure_future(_just(taken) if taken else anext(events))
            try:
                await asyncio.wait((first,), timeout=_AT_ONCE_S)
                if first.done() and (failure := first.exception()) is not None:
                    raise as_api_error(cast(Exception, failure)) from failure
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await self._send_rest(first, events, put)
            finally:
                # Wait for the end of this step: a generator that is still running cannot be closed.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rest(
        self,
        first: asyncio.Future[bytes],
        events: AsyncGenerator[bytes, None],
        put: Callable[[bytes], Awaitable[None]],
    ) -> None:
        while not first.done():
            await asyncio.wait((first,), timeout=self._comment_s)
            if not first.done():
                await put(_COMMENT)
        try:
            await put(first.result())
            async for event in events:
                await put(event)
        except Exception as error:
            await put(self._encode_error(as_api_error(error)))


async def merged(
    streams: Sequence[AsyncGenerator[bytes, None]], end: Callable[[], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of several streams as they come, then the result of `end`.

    The events begin after each stream has given its first, empty event. Events that are ready
    together are yielded together.
    """
    ready: list[bytes] = []
    num_taken = 0
    news, taken = asyncio.Event(), asyncio.Event()

    async def read(stream: AsyncGenerator[bytes, None]) -> None:
        nonlocal num_taken
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    num_taken += not event
                    ready.append(event)
                    news.set()
                    # While the client is slow, tokens merge in the mailboxes of the requests
                    # instead of filling this list.
                    while len(ready) >= _MOST_READY:
                        taken.clear()
                        await taken.wait()
        finally:
            news.set()

    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        while ready or not all(task.done() for task in tasks):
            await news.wait()
            news.clear()
            for task in tasks:
                if task.done():
                    task.result()  # raises what it failed with
            if ready and num_taken == len(tasks):
                event = b"".join(ready)
                ready.clear()
                taken.set()
                yield event
        yield end()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
