"""Measure the cost of routing a request among replicas.

    python benchmarks/host/routing_cost.py [--replicas 2 8] [--tokens 128 1024 8192 65536]
        [--requests 2000]

The output is CPU microseconds of the frontend for each request, `choose` and `finished` together.
The requests are conversations whose prompts have these lengths, on replicas whose prefix trees are
full. Blocks have 64 tokens, as on a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque

import numpy as np

from sidestep.frontend.routing.router import RoutedRequest, Router
from sidestep.ipc.common import registry

BLOCK = 64
CACHE_BLOCKS = 16_384
"""Blocks of a replica, about those of an 8B model on an H200."""
IN_FLIGHT = 256


def conversations(num_tokens: int, count: int) -> list[bytes]:
    """Return prompts of num_tokens tokens: turns of conversations.

    Each turn begins with half of its tokens from an earlier one.
    """
    rng = np.random.default_rng(num_tokens)
    prompts: list[bytes] = []
    for _ in range(count):
        known = (
            random.Random(len(prompts)).choice(prompts)[: num_tokens * 2]
            if len(prompts) > 32
            else b""
        )
        fresh = rng.integers(0, 100_000, num_tokens - len(known) // 4, np.int32)
        prompts.append(known + fresh.tobytes())
    return prompts


def microseconds(name: str, num_replicas: int, prompts: list[bytes]) -> float:
    """Return the mean time of a request."""
    router: Router = registry.load(registry.ROUTERS[name])(
        dict.fromkeys(range(num_replicas), CACHE_BLOCKS), BLOCK
    )
    filler = np.random.default_rng(0).integers(0, 100_000, 1024 * BLOCK, np.int32)
    for i in range(CACHE_BLOCKS // 1024 * num_replicas):
        router.choose(RoutedRequest(-1 - i, np.roll(filler, i).tobytes()))
        router.finished(-1 - i)
    running: deque[int] = deque()
    start = time.process_time()
    for handle, prompt in enumerate(prompts):
        router.choose(RoutedRequest(handle, prompt))
        running.append(handle)
        if len(running) > IN_FLIGHT:
            router.finished(running.popleft())
    return (time.process_time() - start) / len(prompts) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 8192, 65536])
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    names = list(registry.ROUTERS)
    print("| replicas | tokens |", " | ".join(names), "|")
    print("|---|---|" + "---|" * len(names))
    for num_replicas in args.replicas:
        for num_tokens in args.tokens:
            prompts = conversations(num_tokens, args.requests)
            figures = (f"{microseconds(name, num_replicas, prompts):.1f}" for name in names)
            print(f"| {num_replicas} | {num_tokens} |", " | ".join(figures), "|", flush=True)


if __name__ == "__main__":
    main()
