"""Answers as they leave: a client that goes away ends the work for it, and a stream is sent as its events come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidestep.frontend.server.errors import ApiError, ClientGoneError, as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
RAW_SEND = "sidestep.send"
"""Where in a request's scope the server's own `send` is: what wraps it looks at an answer's beginning only, and would
cost as much for each token as the token's event."""
_MOST_READY = 256
"""Events of several choices that wait to be sent together."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns or raises. Cancels it when the client goes away, and raises ClientGoneError then."""
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


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_event(error: ApiError) -> bytes:
    return b"data: %b\n\n%b" % (msgspec.json.encode(error.body), DONE)


class EventStream(Response):
    """Server-sent events. What fails before the first of them is an answer with its own status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None,
                 encode_error: Callable[[ApiError], bytes] | None = None) -> None:
        """events: whole events, one or several at a time. encode_error: makes the last event of a stream that fails."""
        super().__init__(headers={**_STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]  # of the empty body that it would be without the events
        self._events = events
        self._encode_error = encode_error or _error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send(send, scope.get(RAW_SEND, send)), receive)
        except ClientGoneError:
            pass

    async def _send(self, send: Send, send_body: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                event = await anext(events)
            except Exception as error:
                raise as_api_error(error) from error
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_body({"type": "http.response.body", "body": event, "more_body": True})
            try:
                async for event in events:
                    await send_body({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                event = self._encode_error(as_api_error(error))
                await send_body({"type": "http.response.body", "body": event, "more_body": True})
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})


async def merged(streams: Sequence[AsyncGenerator[bytes, None]],
                 end: Callable[[], bytes]) -> AsyncGenerator[bytes, None]:
    """The events of several streams as they come; those that are ready together go out together. Then what `end`
    gives."""
    ready: list[bytes] = []
    news, taken = asyncio.Event(), asyncio.Event()

    async def read(stream: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    ready.append(event)
                    news.set()
                    # While the client is slow, tokens merge in the streams' mailboxes rather than pile up here.
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
            if ready:
                event = b"".join(ready)
                ready.clear()
                taken.set()
                yield event
        yield end()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
