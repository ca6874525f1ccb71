"""The events of one choice. Most are written in the callback in which the engine's message comes, past all tasks.

A token's way is then one call: its text is encoded and handed to the connection. The first event, the last one, and
those that a slow client has not taken yet go through the answer's own task, which can wait.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request

from sidestep.frontend.output_processor import Sink
from sidestep.frontend.outputs import RequestOutput
from sidestep.frontend.server.http_protocol import WRITER, BodyWriter
from sidestep.frontend.server.service import Choice, Service, Tally

Encode = Callable[[RequestOutput], bytes]
"""The events of one output, possibly none."""


def _sink(tally: Tally, encode: Encode, writer: BodyWriter) -> Sink:
    """Where outputs are pushed to; see RequestState.push."""
    note, write, ready = tally.note, writer.write, writer.ready

    def take(next_output: Callable[[], RequestOutput]) -> bool:
        if not ready():
            return False
        output = next_output()
        note(output)
        if event := encode(output):
            write(event)
        return True

    return take


def writer_of(http: Request) -> BodyWriter | None:
    """What events may be written with; None without a connection of our own."""
    return http.scope.get(WRITER)


async def events_of(service: Service, choice: Choice, encode: Encode,
                    writer: BodyWriter | None = None) -> AsyncGenerator[bytes, None]:
    """Events as they come. With a writer only those that could not be written at once: whoever reads this sends what it
    gets before it asks for more."""
    with service.tally(choice) as tally, await service.open_stream(choice) as stream:
        sink = None if writer is None else _sink(tally, encode, writer)
        while True:
            output = await stream.next()
            tally.note(output)
            if event := encode(output):
                yield event
            if output.finished:
                return
            if sink is not None:
                await stream.push(sink)
