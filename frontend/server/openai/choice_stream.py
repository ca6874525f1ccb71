"""Stream of the events of one choice.

Most events are written to the connection in the callback that receives the engine's message, and no
task runs for them. The first event, the last one, and those that the client cannot take yet go
through the answer's own task, which can wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.server.service.service import Choice, Service, Tally
from sidestep.frontend.server.transport.http_protocol import WRITER, BodyWriter

Encode = Callable[[RequestOutput], bytes]
"""Function that makes the events of one output; it may return no bytes."""


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
