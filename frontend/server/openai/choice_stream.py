"""The events of one choice. Most are written in the callback in which the engine's message comes,
past all tasks.

A token's way is then one call: its text is encoded and handed to the connection. The first event,
the last one, and those that a slow client has not taken yet go through the answer's own task, which
can wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.server.service.service import Choice, Service, Tally
from sidestep.frontend.server.transport.http_protocol import WRITER, BodyWriter

Encode = Callable[[RequestOutput], bytes]
"""The events of one output, possibly none."""


class _Connection:
    """Takes outputs that are pushed, as events."""

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
    """What events may be written with; None without a connection of our own."""
    return http.scope.get(WRITER)


async def events_of(
    service: Service, choice: Choice, encode: Encode, writer: BodyWriter | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield an empty event once the engine has taken the request, then the events as they come.
    With a writer, yield only the events that could not be written at once; the caller must send
    each before it asks for the next.
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
