"""CPU that `sidestep serve` spends on a streamed token: all of its process, from the engine's message to the socket.

    python benchmarks/server_cost.py [--clients 1 16 64 192] [--step-ms 2 20] [--tokens 400]

The fake device gives every client a token each step. Each client reads its stream from a connection of its own, in this
process. Microseconds of CPU time (user and system) of the server's process per token; where it cannot keep up with the
steps, tokens of one request go out together, so events are counted too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

import psutil


async def read_stream(port: int, number: int, tokens: int) -> int:
    """One client; the number of events it got."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": [number + 1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    events = 0
    while data := await reader.read(1 << 16):
        events += data.count(b"data: ")
    writer.close()
    return events


async def measure(clients: int, step_ms: float, tokens: int) -> dict[str, float]:
    """One load on a fresh server."""
    server = subprocess.Popen(
        [sys.executable, "-m", "sidestep", "serve", "--port", "0", "--device", "fake", "--fake-step-ms", str(step_ms)],
        stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        port = next(int(found[1]) for line in server.stderr if (found := re.match(r"serving .*:(\d+)", line)))
        process = psutil.Process(server.pid)
        await asyncio.gather(*(read_stream(port, i, 20) for i in range(clients)))
        before, start = process.cpu_times(), time.perf_counter()
        events = sum(await asyncio.gather(*(read_stream(port, i, tokens) for i in range(clients))))
        seconds, after = time.perf_counter() - start, process.cpu_times()
    finally:
        server.terminate()
        server.wait()
    made = clients * tokens
    cpu = after.user + after.system - before.user - before.system
    return {"tokens/s": made / seconds, "tokens/event": made / events, "us/token": cpu / made * 1e6}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 192])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.0, 20.0])
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    print(f"{'clients':>8}{'step ms':>9}{'tokens/s':>10}{'tokens/event':>14}{'us/token':>10}")
    for step_ms in args.step_ms:
        for clients in args.clients:
            row = asyncio.run(measure(clients, step_ms, args.tokens))
            print(f"{clients:8}{step_ms:9.1f}{row['tokens/s']:10.0f}{row['tokens/event']:14.2f}{row['us/token']:10.1f}")


if __name__ == "__main__":
    main()
