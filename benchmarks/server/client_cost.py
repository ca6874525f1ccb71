"""Measure the CPU time that `sidestep bench serve --url` spends on an event.

    python benchmarks/server/client_cost.py [--streams 1 64 192 400 600] [--step-ms 20]
        [--tokens 200]

It also shows how many events a second one such process receives in time. The server is another
process, which only sends every stream an event each step, the same for all. If the 99th percentile
of the gaps is larger than the step, client or server is late. Several events that come together
count as several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.http_stream import HttpServer
from sidestep.frontend.bench.load import PlannedRequest
from sidestep.frontend.bench.load_http import HttpTarget
from sidestep.frontend.bench.load_report import make_report
from sidestep.frontend.bench.load_send import send_all

EVENT = (
    b'data: {"id":"cmpl-7a1dfddad5f848a9893dff4f53ef951b","object":"text_completion",'
    b'"created":1795267968,"model":"m","choices":[{"index":0,"text":"_files","logprobs":null,'
    b'"finish_reason":null}],"usage":null}\n\n'
)
END = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of an HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def feed(step_ms: float) -> None:
    """Run the server, and print its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        tokens = json.loads(await reader.readexactly(int(length[1])))["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        event, begin = chunk(EVENT), time.monotonic()
        for number in range(1, tokens + 1):
            await asyncio.sleep(max(0.0, begin + number * step_ms / 1e3 - time.monotonic()))
            writer.write(event)
        writer.write(chunk(END % tokens) + chunk(b""))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(port: int, streams: int, tokens: int) -> dict[str, float]:
    """Measure one load."""
    target = HttpTarget(HttpServer(f"http://127.0.0.1:{port}"), None, 0.0)
    load = [PlannedRequest([1, 2, 3], tokens, 0.0)] * streams
    await send_all(target, load[:2], time.monotonic(), None)
    cpu, begin = time.process_time(), time.monotonic()
    samples = await send_all(target, load, begin, None)
    cpu, report = time.process_time() - cpu, make_report(samples, begin, {})
    assert report["failed"] == 0, report
    events = sum(len(s.arrivals) for s in samples)
    return {
        "events/s": events / float(report["seconds"]),
        "us/event": cpu / events * 1e6,
        "p50": float(report["itl_ms_p50"]),
        "p99": float(report["itl_ms_p99"]),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 192, 400, 600])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--feed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if args.feed:
            runner.run(feed(args.step_ms))
        command = [sys.executable, __file__, "--feed", "--step-ms", str(args.step_ms)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline())
                print(f"{'streams':>8}{'events/s':>10}{'us/event':>10}{'gap p50 ms':>12}{'p99':>8}")
                for streams in args.streams:
                    row = runner.run(measure(port, streams, args.tokens))
                    print(
                        f"{streams:8}{row['events/s']:10.0f}{row['us/event']:10.1f}"
                        f"{row['p50']:12.2f}{row['p99']:8.2f}"
                    )
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
