"""Measure a server at 90% of its capacity, then at twice its capacity, with limits set.

    python benchmarks/server/overload.py [--seconds 600] [--calm-seconds 180] [--step-ms 20]
        [--seqs 16] [--queued 12] [--json FILE]

The server runs on the fake device, whose steps take `--step-ms`, and has room for `--seqs` requests
at once. Clients of HTTP, each with a connection of its own, send streamed completions from this
process. First a closed loop that keeps the queue full measures the capacity. Then requests come at
random times (Poisson) at 90% of it, and at twice the capacity for `--seconds`. A request that is
refused does not come again. `/health` is asked all the time.

The table has the times to the first token of the admitted, the number of those refused with 429 and
`Retry-After`, everything else that went wrong, and the memory of the server's processes, ten times
a load. The exit status is 1 unless all these hold at twice the capacity: nothing but 429 with
`Retry-After` is refused, each admitted stream is complete, the p99 of the time to the first token
is at most twice that at 90%, and memory grows by less than 5% after the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.server.live_server import serving
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.http_stream import BusyError, HttpServer
from sidestep.frontend.bench.load import Lengths, PlannedRequest, arrivals, random_requests
from sidestep.frontend.bench.load_http import HttpTarget
from sidestep.frontend.bench.load_report import Sample, percentile
from sidestep.ipc.common.errors import RequestError

INPUTS, OUTPUTS = Lengths(32, 64), Lengths(32, 64)
VOCAB = 250
"""Token ids below this are those of single bytes, so every token has a text."""


@dataclass
class Load:
    """One load, and what its clients saw."""

    name: str
    rate: float
    seconds: float = 0.0
    admitted: list[Sample] = field(default_factory=list)
    refused: int = 0
    """Requests that got 429 and Retry-After."""
    problems: Counter[str] = field(default_factory=Counter)
    """Everything else that went wrong, and how often."""
    memory: list[dict[str, float]] = field(default_factory=list)
    """MB of each process, ten times a load."""

    def ttft(self, percent: int) -> float:
        """Return a percentile of the seconds to the first token of the admitted."""
        return percentile([sample.ttft for sample in self.admitted], percent)

    def row(self) -> str:
        """Return the table's row."""
        tokens = sum(sample.num_output_tokens for sample in self.admitted)
        return (
            f"{self.name:12}{self.rate:9.2f}{len(self.admitted):10}{self.refused:9}"
            f"{sum(self.problems.values()):7}{self.ttft(50):10.3f}{self.ttft(99):9.3f}"
            f"{max(sample.ttft for sample in self.admitted):9.3f}{tokens / self.seconds:10.0f}"
        )

    def growth(self) -> dict[str, tuple[float, float]]:
        """Return the MB of each process after a fifth of the load, and at its end."""
        return {name: (self.memory[1][name], self.memory[-1][name]) for name in self.memory[-1]}


class Clients:
    """Clients of one server."""

    def __init__(self, url: str, pid: int) -> None:
        """Send nothing yet. pid: the server's first process."""
        self._http = HttpServer(url)
        self._target = HttpTarget(self._http, None, 0.0)
        self._pid = pid

    async def closed(self, clients: int, seconds: float) -> float:
        """Return the requests a second that end while clients ask again and again."""
        until, ends = time.monotonic() + seconds, list[float]()
        requests = planned(clients * 400, itertools.repeat(0.0), seed=1)

        async def ask() -> None:
            while time.monotonic() < until:
                try:
                    await self._target.send(next(requests), Sample(0.0, time.monotonic()))
                    ends.append(time.monotonic())
                except BusyError:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(ask() for _ in range(clients)))
        # The first fifth fills the batch, and at the end the batch empties.
        begin = until - seconds * 0.8
        return sum(begin <= end < until for end in ends) / (until - begin)

    async def load(self, name: str, rate: float, seconds: float) -> Load:
        """Return what clients saw that come at random times."""
        load, begin = Load(name, rate), time.monotonic()
        watching = [
            asyncio.create_task(self._watch_memory(load, seconds / 10)),
            asyncio.create_task(self._watch_health(load)),
        ]
        running = set[asyncio.Task[None]]()
        for request in planned(round(rate * seconds), arrivals(rate, True, 3), seed=2):
            await asyncio.sleep(max(0.0, begin + request.at - time.monotonic()))
            task = asyncio.create_task(self._send(request, load))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        load.seconds = time.monotonic() - begin
        for task in watching:
            task.cancel()
        load.memory.append(memory_of(self._pid))
        return load

    async def _send(self, request: PlannedRequest, load: Load) -> None:
        sample = Sample(planned=request.at, sent=time.monotonic())
        try:
            await self._target.send(request, sample)
        except BusyError as error:
            if str(error).startswith("429"):
                load.refused += 1
            else:
                load.problems[str(error)[:100]] += 1
        except RequestError as error:
            load.problems[str(error)[:100]] += 1
        else:
            load.admitted.append(sample)
            if sample.num_output_tokens != request.output_len:
                load.problems["a stream with another number of tokens"] += 1

    async def _watch_memory(self, load: Load, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            load.memory.append(memory_of(self._pid))

    async def _watch_health(self, load: Load) -> None:
        while True:
            try:
                await self._http.get("/health")
            except RequestError as error:
                load.problems[f"/health: {str(error)[:90]}"] += 1
            await asyncio.sleep(0.5)


def planned(count: int, times: Iterator[float], seed: int) -> Iterator[PlannedRequest]:
    """Yield requests with times."""
    for prompt, length in random_requests(count, INPUTS, OUTPUTS, VOCAB, seed):
        yield PlannedRequest(prompt, length, next(times))


def memory_of(pid: int) -> dict[str, float]:
    """Return the MB of the server's process and of its children, by name."""
    server = psutil.Process(pid)
    found = {"server": server.memory_info().rss / 1e6}
    for child in server.children(recursive=True):
        name = child.cmdline()[-1]
        if name.startswith(("engine core", "worker")):
            found[name] = child.memory_info().rss / 1e6
    return found


async def run(args: argparse.Namespace) -> list[Load]:
    """Print the table, and return the loads at 90% and at twice the capacity."""
    options = {"fake_step_ms": args.step_ms, "max_num_seqs": args.seqs}
    options["max_num_queued_reqs"] = args.queued
    with serving("--device", "fake", **options) as (url, pid):
        clients = Clients(url, pid)
        capacity = await clients.closed(args.seqs + args.queued, args.calm_seconds / 3)
        print(f"capacity {capacity:.2f} requests a second", flush=True)
        print(
            f"{'load':12}{'asked/s':>9}{'admitted':>10}{'429':>9}{'wrong':>7}{'TTFT p50':>10}"
            f"{'p99':>9}{'longest':>9}{'tokens/s':>10}"
        )
        calm = await clients.load("90%", 0.9 * capacity, args.calm_seconds)
        print(calm.row(), flush=True)
        heavy = await clients.load("200%", 2 * capacity, args.seconds)
        print(heavy.row(), flush=True)
    return [calm, heavy]


def verdict(calm: Load, heavy: Load) -> list[str]:
    """Return what does not hold."""
    found = [f"{count} times: {problem}" for problem, count in heavy.problems.items()]
    if heavy.ttft(99) > 2 * calm.ttft(99):
        found.append("the p99 of the time to the first token is more than twice that at 90%")
    if not heavy.refused:
        found.append("nothing was refused")
    for name, (before, after) in heavy.growth().items():
        if after > 1.05 * before:
            found.append(f"the memory of {name} has grown from {before:.0f} to {after:.0f} MB")
    return found


def as_json(loads: Sequence[Load]) -> str:
    """Return the figures of the loads."""
    return json.dumps(
        [
            {
                "name": load.name,
                "rate": load.rate,
                "seconds": load.seconds,
                "admitted": len(load.admitted),
                "refused": load.refused,
                "problems": load.problems,
                "ttft": {percent: load.ttft(percent) for percent in (50, 90, 99)},
                "memory": load.memory,
            }
            for load in loads
        ],
        indent=1,
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--calm-seconds", type=float, default=180.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seqs", type=int, default=16)
    parser.add_argument("--queued", type=int, default=12)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        calm, heavy = runner.run(run(args))
    for name, (before, after) in heavy.growth().items():
        print(f"memory of {name}: {before:.1f} MB after a fifth, {after:.1f} MB at the end")
    if args.json:
        Path(args.json).write_text(as_json([calm, heavy]))
    problems = verdict(calm, heavy)
    print("\n".join(problems) or "all goals are met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
