"""Make an answer of its choices: one body, or a stream of their events.

Most events are written to the connection in the callback that receives the engine's message, and no
task runs for them. The first event of a choice, its last one, and those that the client cannot take
yet go through the answer's own task, which can wait.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.output.outputs import CompletionOutput, RequestOutput
from sidestep.frontend.server.openai.encoding import EventEncoder, IdsOfChoice, usage_event
from sidestep.frontend.server.schemas.fields import SamplingFields, StreamOptions
from sidestep.frontend.server.schemas.protocol import ChatLogprobs, CompletionLogprobs, Usage
from sidestep.frontend.server.service.service import Choice, Service, Tally, usage_of
from sidestep.frontend.server.transport.connection import DONE, EventStream, merged, while_connected
from sidestep.frontend.server.transport.http_protocol import WRITER, BodyWriter

Encode = Callable[[RequestOutput], bytes]
"""Function that makes the events of one output; it may return no bytes."""
Ending = Callable[[CompletionOutput], tuple[str, ChatLogprobs | CompletionLogprobs | None]]
"""Function that returns the finish reason of a choice, and the logprobs that no event has yet."""


class _Connection:
    """Sink that writes each pushed output to the connection, as events."""

    def __init__(self, tally: Tally, encode: Encode, writer: BodyWriter) -> None:
        self.ready = writer.ready
        self._note = tally.note
        self._encode = encode
        self._write = writer.write

    def put(self, output: RequestOutput) -> None:
        self._note(output)
        if event := self._encode(output):
            self._write(event)


def writer_of(http: Request) -> BodyWriter | None:
    """Return the writer of the request's connection; None if the server owns no connection."""
    return http.scope.get(WRITER)


async def events_of(
    service: Service, choice: Choice, encode: Encode, writer: BodyWriter | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield an empty event once the engine has taken the request, then the events as they come.

    With a writer, yield only the events that could not be written at once. The caller must send
    each event before it asks for the next.
    """
    with service.tally(choice) as tally:
        async with choice.open() as reader:
            yield b""
            connection = None if writer is None else _Connection(tally, encode, writer)
            while True:
                output = await reader.next_output()
                tally.note(output)
                if event := encode(output):
                    yield event
                if output.finished:
                    return
                if connection is not None:
                    await reader.push(connection)


@dataclass(kw_only=True, eq=False)
class Answer(ABC):
    """Answer of /v1/chat/completions or /v1/completions to one request."""

    event_object: ClassVar[str]
    """Value of `object` in the events of a stream."""
    content_key: ClassVar[str]
    """Key of an event's choice for new content: 'delta' or 'text'."""
    service: Service
    name: str
    """Id of the answer."""
    model: str
    choices: Sequence[Choice]
    n: int
    """Number of choices of each prompt."""
    with_ids: bool
    """Whether token ids are sent beside the text."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of the answer, in seconds since the epoch."""
    last: dict[int, RequestOutput] = field(default_factory=dict)
    """Index of each choice whose stream has ended -> its last output."""

    @abstractmethod
    def _body(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct:
        """Return the body with the last outputs of all choices."""

    @abstractmethod
    def _makers(self, index: int, encoder: EventEncoder, ids: IdsOfChoice) -> tuple[Encode, Ending]:
        """Return the functions that make a choice's events for new content, and its ending."""

    def _trimmed(self, output: RequestOutput) -> RequestOutput:
        """Return an output with the tokens that the request asks for."""
        return output

    async def respond(
        self, http: Request, request: SamplingFields, *, in_queue: bool = False
    ) -> Response:
        """Return the answer in the form that the request asks for.

        in_queue: send the request's queue positions while it waits. Raises ClientGoneError when the
        client goes away before a body is complete.
        """
        if not request.stream:
            return await while_connected(self._whole(), http.receive)
        events = self._events(request.stream_options or StreamOptions(), writer_of(http))
        if in_queue:
            events = self.service.queue.events(events, self.choices[0].request_id)
        return EventStream(
            events, {"x-request-id": self.name}, comment_s=self.service.args.stream_comments
        )

    async def _whole(self) -> Response:
        outputs = [self._trimmed(output) for output in await self.service.whole(self.choices)]
        return Response(
            msgspec.json.encode(self._body(outputs, usage_of(outputs, self.n))),
            media_type="application/json",
            headers={"x-request-id": self.name},
        )

    def _events(
        self, options: StreamOptions, writer: BodyWriter | None
    ) -> AsyncGenerator[bytes, None]:
        """Return the server-sent events of all choices."""
        head: dict[str, object] = {
            "id": self.name,
            "object": self.event_object,
            "created": self.created,
            "model": self.model,
        }

        def end() -> bytes:
            outputs = [output for _, output in sorted(self.last.items())]
            event = usage_event(head, usage_of(outputs, self.n)) if options.include_usage else b""
            return event + DONE

        if len(self.choices) == 1:
            encode = self._encode(0, head, options, end)
            return events_of(self.service, self.choices[0], encode, writer)
        return merged(
            [
                events_of(self.service, choice, self._encode(i, head, options, lambda: b""))
                for i, choice in enumerate(self.choices)
            ],
            end,
        )

    def _encode(
        self, index: int, head: dict[str, object], options: StreamOptions, end: Callable[[], bytes]
    ) -> Encode:
        """Return a function that makes the events of one choice.

        end: makes the events that follow the last one of the choice.
        """
        encoder = EventEncoder(index, head, self.content_key, options.include_usage)
        ids = IdsOfChoice(self.with_ids)
        make_new, ending = self._makers(index, encoder, ids)

        def encode(output: RequestOutput) -> bytes:
            output = self._trimmed(output)
            completion = output.outputs[0]
            ids.add(completion.token_ids)
            if options.continuous_usage_stats:
                encoder.set_usage(usage_of([output], 1))
            events = make_new(output)
            if output.finished:
                self.last[index] = output
                reason, logprobs = ending(completion)
                events += encoder.end(reason, completion.stop_reason, logprobs, ids.take()) + end()
            return events

        return encode
