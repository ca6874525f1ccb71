"""A model that runs elsewhere, asked over the OpenAI API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from sidestep.ipc.common.errors import CannotChatError, RemoteError, ValidationError

# A long prompt may take minutes until its first token; the user can leave at any time.
_TIMEOUT = httpx2.Timeout(None, connect=10.0)
_LONGEST_PAGE = 200
"""Most characters that are shown of an error's body that is not of the API's form."""
_BUSY = (429, 503)
"""Statuses of servers that have no room, or end."""
_MOST_RETRIES = 5
"""Most times that a request is sent again to such a server, if it says when."""
_NO_CHAT_TEMPLATE = "no_chat_template"
"""Code of a Sidestep server's error for a conversation with a model that has no chat template."""


class _Named(msgspec.Struct):
    id: str


class _RemoteModels(msgspec.Struct):
    data: list[_Named]


class _Error(msgspec.Struct):
    message: str
    code: Any = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Delta(msgspec.Struct):
    content: str | None = None


class _StreamChoice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None


class _StreamChunk(msgspec.Struct):
    """The fields of a stream's event that are needed here, of chats and of completions."""

    choices: list[_StreamChoice] = []
    error: _Error | None = None


def base_url(url: str) -> str:
    """Return the URL that the routes begin with; raises ValidationError.

    A URL without a path gets the usual one.
    """
    try:
        parts = urlsplit(url)
        valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        valid = False
    if not valid:
        raise ValidationError(
            "url", f"must be like http://127.0.0.1:8000 or https://host/v1, not {url!r}"
        )
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


class RemoteQueuePosition(msgspec.Struct):
    """The data of an event 'queue' of a Sidestep server.

    See frontend/server/service/queue_events.py.
    """

    before: int
    or_more: bool = False

    @property
    def text(self) -> str:
        """The position in words."""
        return f"waiting, {self.before}{' or more' * self.or_more} before you"


class RemoteModel:
    """One model of one server; its methods raise RemoteError."""

    def __init__(
        self, url: str, key: str | None, model: str | None, sampling: Mapping[str, Any]
    ) -> None:
        """Prepare the requests, without a connection yet.

        model: the model's name at the server; None for the server's first model. sampling: fields
        of every request.
        """
        self._url = base_url(url)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._http = httpx2.AsyncClient(headers=headers, timeout=_TIMEOUT)
        except UnicodeEncodeError:
            raise ValidationError("api_key", "has characters that no header may have") from None
        self._model = model
        self._sampling = dict(sampling)
        self.on_queue: Callable[[RemoteQueuePosition], None] | None = None
        """A function to call while a chat waits in the server's queue.

        It is called only if the server reports the position in the queue.
        """

    async def connect(self) -> str:
        """Find the server, and return the model's name there."""
        if self._model is None:
            async with self._failures():
                answer = await self._http.get(f"{self._url}/models")
                await _check(answer)
                models = msgspec.json.decode(answer.content, type=_RemoteModels).data
            if not models:
                raise RemoteError(f"{self._url} serves no model")
            self._model = models[0].id
        return self._model

    def chat(self, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[str, None]:
        """Return the answer to a conversation, piece by piece."""
        return self._stream("/chat/completions", {"messages": list(messages)})

    def complete(self, prompt: str) -> AsyncGenerator[str, None]:
        """Return the completion of a text, piece by piece."""
        return self._stream("/completions", {"prompt": prompt})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        body = {"model": await self.connect(), **body, **self._sampling, "stream": True}
        headers = {"x-queue-events": "1"} if self.on_queue is not None else {}
        async with self._failures(), self._answer(path, body, headers) as answer:
            async for event in httpx2.EventSource(answer):
                if event.data == "[DONE]":
                    return
                if event.event == "queue":
                    if self.on_queue is not None:
                        self.on_queue(msgspec.json.decode(event.data, type=RemoteQueuePosition))
                    continue
                chunk = msgspec.json.decode(event.data, type=_StreamChunk)
                if chunk.error is not None:
                    raise RemoteError(chunk.error.message)
                for choice in chunk.choices:
                    if piece := choice.text or choice.delta.content:
                        yield piece

    @asynccontextmanager
    async def _answer(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        """Yield the answer to a request, which is sent again if the server has no room.

        Raises RemoteError for an answer that is an error.
        """
        for tries_left in reversed(range(_MOST_RETRIES + 1)):
            async with self._http.stream(
                "POST", self._url + path, json=body, headers=headers
            ) as answer:
                after = answer.headers.get("retry-after", "")
                if not (tries_left and answer.status_code in _BUSY and after.isdigit()):
                    await _check(answer)
                    yield answer
                    return
            await asyncio.sleep(int(after))

    @asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        """Raise RemoteError, in one line, for an error of the connection or the server."""
        try:
            yield
        except httpx2.HTTPError as error:
            raise RemoteError(f"{self._url}: {error or type(error).__name__}") from None
        except msgspec.DecodeError as error:
            raise RemoteError(f"{self._url} does not speak the OpenAI API: {error}") from None


async def _check(answer: httpx2.Response) -> None:
    """Raise RemoteError for an answer that is an error, with the answer's message.

    Raises CannotChatError if the model has no chat template.
    """
    if answer.status_code == 200:
        return
    body = await answer.aread()
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
        if error.code == _NO_CHAT_TEMPLATE:
            raise CannotChatError(
                "the model has no chat template, so it cannot chat; `sidestep generate --url` "
                "completes text with it"
            )
        message = error.message
    except msgspec.DecodeError:
        message = " ".join(body.decode(errors="replace").split())[:_LONGEST_PAGE]
    raise RemoteError(f"{answer.url} answered with status {answer.status_code}: {message}")
