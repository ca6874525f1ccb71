"""Compute the best latencies that a load of single requests allows: a queue with a fixed cost.

    python benchmarks/engine/online_bound.py [--rate 50] [--seconds 12]
        [--us-per-token 19 21 23 25] [--chunk 1024 2048 8192]
        [--order first shortest aged ratio]

The load is that of benchmarks/engine/gpu_online.py. Each step takes one token of every request that
decodes, and prompts, first come first served, up to --chunk tokens (all 8,192 while no request
decodes). It lasts as long as its tokens cost, at least as long as reading the weights, and then its
keys and values are read. There is no host and no idle time. So it shows the limit of a device with
a given rate of arithmetic, under any schedule of this kind. --order shows whether another order of
the waiting requests would be better: `shortest` prompt first, `aged` (the shortest, less the time
that it has waited), or by the `ratio` of that time to its length.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workloads import online
from sidestep.frontend.bench.load_report import percentile

_LARGEST = 8192
_WEIGHTS_S, _KV_BYTES, _BYTES_PER_S = 3.7e-3, 131_072, 4.2e12
"""Seconds of a step of few tokens, bytes of one token's keys and values, reading speed.

They are those of Llama-3.1-8B in bf16 on an H200; the speed is in bytes a second.
"""


@dataclass
class Request:
    """Request of the load."""

    at: float
    prompt_left: int
    output_left: int
    length: int
    last: float = 0.0


Order = Callable[[Request, float, float], float]
"""Function of a request, the time and the seconds a token; the least value comes first."""
ORDERS: dict[str, Order] = {
    "first": lambda request, now, token_s: request.at,
    "shortest": lambda request, now, token_s: request.prompt_left,
    "aged": lambda request, now, token_s: request.prompt_left * token_s - (now - request.at),
    "ratio": lambda request, now, token_s: (request.at - now) / request.prompt_left,
}


def run(
    load: list[Request], chunk: int, token_s: float, order: Order
) -> tuple[list[float], list[float]]:
    """Return the seconds to each request's first token, and all gaps after it."""
    now, waiting, running = 0.0, list[Request](), list[Request]()
    ttft, gaps = list[float](), list[float]()
    while load or waiting or running:
        if not waiting and not running:
            now = max(now, load[0].at)
        while load and load[0].at <= now:
            waiting.append(load.pop(0))
        waiting.sort(key=lambda request: order(request, now, token_s))
        left = prompts = (chunk if running else _LARGEST) - len(running)
        for request in waiting:
            taken = min(left, request.prompt_left)
            request.prompt_left -= taken
            left -= taken
        tokens = prompts - left + len(running)
        read = sum(request.length for request in running) * _KV_BYTES / _BYTES_PER_S
        now += max(_WEIGHTS_S, tokens * token_s) + read
        gaps += [now - request.last for request in running]
        first = [request for request in waiting if not request.prompt_left]
        ttft += [now - request.at for request in first]
        for request in running + first:
            request.last, request.length, request.output_left = (
                now,
                request.length + 1,
                request.output_left - 1,
            )
        running = [request for request in running + first if request.output_left]
        waiting = [request for request in waiting if request.prompt_left]
    return ttft, gaps


def main() -> None:
    """Print a line for each cost, chunk and order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--us-per-token", nargs="+", type=float, default=[19, 21, 23, 25])
    parser.add_argument("--chunk", nargs="+", type=int, default=[1024, 2048, 8192])
    parser.add_argument("--order", nargs="+", choices=list(ORDERS), default=["first"])
    args = parser.parse_args()
    planned = online(args.rate, round(args.rate * args.seconds), 128_256)
    for cost in args.us_per_token:
        for chunk, order in itertools.product(args.chunk, args.order):
            load = [Request(at, len(prompt), length, len(prompt)) for at, prompt, length in planned]
            ttft, gaps = (
                [value * 1e3 for value in values]
                for values in run(load, chunk, cost / 1e6, ORDERS[order])
            )
            print(
                f"{cost:g} us a token, chunks of {chunk}, {order}: "
                f"TTFT p50/p99 {percentile(ttft, 50):.0f}/{percentile(ttft, 99):.0f} ms, "
                f"ITL p50/p99 {percentile(gaps, 50):.1f}/{percentile(gaps, 99):.1f} ms"
            )


if __name__ == "__main__":
    main()
