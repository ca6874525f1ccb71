"""Kill processes of a server amid streams of the bundled model, and check that none misses a token.

    python benchmarks/recovery/killed_server.py [--streams 32] [--tokens 300]

The server has one replica of the model on the CPU and three API processes. Streams are greedy. When
each has a tenth of its tokens, SIGKILL ends the worker, the engine core, or one of the API
processes but the first, each on a server of its own. A client whose connection ends early asks
again, with the ids of the tokens that it has.

The table has the time from the start of the server to its readiness, the longest pause of a stream,
the number of streams whose clients had to ask again, and tokens that differ from those of a run
before the death. The exit status is 1 if a token differs, an error comes, or a pause is longer than
twice the start.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.server.live_server import serving
from sidestep.frontend.bench.http_stream import BusyError, HttpServer
from sidestep.ipc.common.errors import RequestError

TRIES = 50
"""Most times that a client asks again."""
PAUSE_S = 0.1
API_PROCESSES = 3


class StreamError(Exception):
    """An error that a client must not get."""


@dataclass
class Stream:
    """The tokens that a client got."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When tokens came."""
    num_resumed: int = 0

    @property
    def pause(self) -> float:
        """The longest time between two events with tokens."""
        return max(after - before for before, after in itertools.pairwise(self.times))

    def take(self, data: bytes) -> None:
        """Take an event's data."""
        event = json.loads(data)
        if "error" in event:
            raise StreamError(event["error"]["message"])
        for choice in event["choices"]:
            if new := choice.get("token_ids"):
                self.tokens += new
                self.times.append(time.monotonic())


async def read(server: HttpServer, stream: Stream, count: int) -> None:
    """Read a stream to its end, and ask again where the connection ends before.

    Raises StreamError, and RequestError after many tries.
    """
    fields = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    while len(stream.tokens) < count:
        rest = b""

        def receive(part: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    stream.take(line[6:])

        prompt = [*stream.prompt, *stream.tokens]
        body = {"prompt": prompt, "max_tokens": count - len(stream.tokens), **fields}
        try:
            await server.request("POST", "/v1/completions", json.dumps(body).encode(), receive)
        except RequestError as error:
            if not isinstance(error, BusyError) and "429" <= str(error)[:3] <= "599":
                raise StreamError(str(error)) from None
            stream.num_resumed += 1
            if stream.num_resumed > TRIES:
                raise
            await asyncio.sleep(PAUSE_S)


def prompts(count: int) -> list[list[int]]:
    """Return different prompts of token ids."""
    return [[5 + i % 7] * 20 + [40 + i] for i in range(count)]


async def read_all(server: HttpServer, streams: list[Stream], count: int) -> None:
    """Read streams side by side."""
    await asyncio.gather(*(read(server, stream, count) for stream in streams))


async def killed(
    server: HttpServer, victim: psutil.Process, count: int, tokens: int
) -> list[Stream]:
    """Return streams amid which a process was killed."""
    streams = [Stream(prompt) for prompt in prompts(count)]
    reading = asyncio.create_task(read_all(server, streams, tokens))
    while min(len(stream.tokens) for stream in streams) < tokens // 10 and not reading.done():
        await asyncio.sleep(0.01)
    victim.kill()
    await reading
    return streams


async def undisturbed(server: HttpServer, count: int, tokens: int) -> list[list[int]]:
    """Return the tokens of the same streams without a death."""
    streams = [Stream(prompt) for prompt in prompts(count)]
    await read_all(server, streams, tokens)
    return [stream.tokens for stream in streams]


def victims(pid: int) -> dict[str, psutil.Process]:
    """Return the processes of a server but the first, by name."""
    found = dict[str, psutil.Process]()
    for child in psutil.Process(pid).children(recursive=True):
        try:
            name = (child.cmdline() or [""])[-1]
        except psutil.NoSuchProcess:  # it has ended
            continue
        if name.startswith(("engine core", "worker", "API process")):
            found[name.partition(" (")[0]] = child
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    print(f"{'killed':16}{'start s':>9}{'pause s':>9}{'asked again':>13}{'differ':>8}")
    has_failed = False
    names = ["worker 0", "engine core", *(f"API process {i}" for i in range(1, API_PROCESSES))]
    for name in names:
        begin = time.monotonic()
        with serving(device="cpu", api_server_count=API_PROCESSES) as (url, pid):
            start = time.monotonic() - begin
            server = HttpServer(url)
            expected = asyncio.run(undisturbed(server, args.streams, args.tokens))
            victim = victims(pid)[name]
            streams = asyncio.run(killed(server, victim, args.streams, args.tokens))
        pause = max(stream.pause for stream in streams)
        differ = sum(s.tokens != tokens for s, tokens in zip(streams, expected, strict=True))
        resumed = sum(stream.num_resumed > 0 for stream in streams)
        print(f"{name:16}{start:9.2f}{pause:9.2f}{resumed:13}{differ:8}", flush=True)
        has_failed |= differ > 0 or pause > 2 * start
    return 1 if has_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
