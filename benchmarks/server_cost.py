"""Measure the CPU time that `sidestep serve` spends on a streamed token.

    python benchmarks/server_cost.py [--clients 1 16 64 192] [--step-ms 2 20] [--tokens 400]
        [--bare]

It covers the server's whole process, from the engine's message to the socket. The fake device gives
every client a token each step. Each client reads its stream from a connection of its own, in this
process. The output is microseconds of CPU time (user and system) of the server's process per token.
If the server cannot keep up with the steps, tokens of one request go out together, so events are
counted too. With --bare the server is a loop that only sends each client an event of the same size
each step, which shows the operating system's share of the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import select
import socket
import subprocess
import sys
import time

import psutil


async def read_stream(port: int, number: int, tokens: int) -> int:
    """Read one client's stream, and return the number of its events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"prompt": [number + 1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    events = 0
    while data := await reader.read(1 << 16):
        events += data.count(b"data: ")
    writer.close()
    return events


EVENT = b"fa\r\ndata: " + b"x" * 242 + b"\n\n\r\n"


def serve_bare(step_ms: float) -> None:
    """Run the bare loop, which sends each client the number of events that it asks for."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
    print(f"serving events at :{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    listener.setblocking(False)
    left: dict[socket.socket, int] = {}
    while True:
        time.sleep(step_ms / 1e3)
        while select.select([listener], [], [], 0)[0]:
            client, _ = listener.accept()
            client.setblocking(True)
            left[client] = json.loads(client.recv(1 << 16).partition(b"\r\n\r\n")[2])["max_tokens"]
        for client in list(left):
            client.send(EVENT)
            left[client] -= 1
            if not left[client]:
                client.close()
                del left[client]


async def measure(
    clients: int, step_ms: float, tokens: int, bare: bool = False
) -> dict[str, float]:
    """Measure one load on a fresh server."""
    words = (
        [__file__, "--serve-bare"]
        if bare
        else ["-m", "sidestep", "serve", "--port", "0", "--device", "fake", "--fake-step-ms"]
    )
    server = subprocess.Popen(
        [sys.executable, *words, str(step_ms)], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        port = next(
            int(found[1])
            for line in server.stderr
            if (found := re.match(r"serving .*:(\d+)", line))
        )
        process = psutil.Process(server.pid)
        await asyncio.gather(*(read_stream(port, i, 20) for i in range(clients)))
        before, start = process.cpu_times(), time.perf_counter()
        events = sum(await asyncio.gather(*(read_stream(port, i, tokens) for i in range(clients))))
        seconds, after = time.perf_counter() - start, process.cpu_times()
    finally:
        server.terminate()
        server.wait()
    made = clients * tokens
    own, system = (
        (end - begin) / made * 1e6 for begin, end in zip(before[:2], after[:2], strict=True)
    )
    return {
        "tokens/s": made / seconds,
        "tokens/event": made / events,
        "us/token": own + system,
        "system": system,
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 192])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 20.0])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--serve-bare", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_bare is not None:
        serve_bare(args.serve_bare)
    print(
        f"{'clients':>8}{'step ms':>9}{'tokens/s':>10}{'tokens/event':>14}{'us/token':>10}"
        f"{'of it system':>14}"
    )
    for step_ms in args.step_ms:
        for clients in args.clients:
            row = asyncio.run(measure(clients, step_ms, args.tokens, args.bare))
            print(
                f"{clients:8}{step_ms:9.1f}{row['tokens/s']:10.0f}{row['tokens/event']:14.2f}"
                f"{row['us/token']:10.1f}{row['system']:14.1f}"
            )


if __name__ == "__main__":
    main()
