"""Serve an engine by Ray Serve, and measure the cost of the way through it.

    pip install 'sidestep[ray-serve]'
    python examples/ray_serve.py                        # POST /generate, until Ctrl-C
    python examples/ray_serve.py --measure 1 32         # streams at once, by three ways

The deployment has the AsyncLLM, whose replicas Ray places on other nodes. Flags of the engine may
follow, such as --data-parallel-size 4 --ray-gpus 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPT = "def get_name("
URL = "http://127.0.0.1:8000/generate"


class Times(NamedTuple):
    """The times of one stream, in seconds."""

    first: float
    """From the request to the first piece of text."""
    whole: float


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Engine:
    """A deployment whose one replica is the head of an engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.llm = AsyncLLM.from_engine_args(EngineArgs(**{"placer": "ray", **options}))

    async def __call__(self, request: Request) -> StreamingResponse:
        """Stream the text that follows a prompt."""
        body = await request.json()
        return StreamingResponse(
            self.pieces(body["prompt"], body["max_tokens"]), 200, None, "text/plain"
        )

    async def pieces(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        """Yield the text that follows a prompt, piece by piece."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self.llm.generate(prompt, params):
            yield output.outputs[0].text

    async def direct(self, streams: int, max_tokens: int) -> list[Times]:
        """Run a load here, beside the engine, and return the times."""
        return await asyncio.gather(
            *(timed(self.pieces(PROMPT, max_tokens)) for _ in range(streams))
        )


async def timed(pieces: AsyncIterator[str]) -> Times:
    """Read a stream to its end and return its times."""
    start, first = time.perf_counter(), 0.0
    async for _ in pieces:
        first = first or time.perf_counter() - start
    return Times(first, time.perf_counter() - start)


def read_url(max_tokens: int) -> Times:
    """Read a stream over HTTP to its end and return its times."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": max_tokens}).encode()
    start, first = time.perf_counter(), 0.0
    with urllib.request.urlopen(urllib.request.Request(URL, body)) as response:
        while response.read1(1 << 16):
            first = first or time.perf_counter() - start
    return Times(first, time.perf_counter() - start)


async def measure(handle: Any, streams: int, max_tokens: int) -> None:
    """Print a line of the table for each of the three ways."""
    through_handle = handle.options(stream=True)
    with ThreadPoolExecutor(streams) as pool:
        loop = asyncio.get_running_loop()
        ways = {
            "direct": lambda: handle.direct.remote(streams, max_tokens),
            "handle": lambda: asyncio.gather(
                *(timed(through_handle.pieces.remote(PROMPT, max_tokens)) for _ in range(streams))
            ),
            "HTTP": lambda: asyncio.gather(
                *(loop.run_in_executor(pool, read_url, max_tokens) for _ in range(streams))
            ),
        }
        for name, run in ways.items():
            await run()  # first use of everything
            start = time.perf_counter()
            times = await run()
            rate = streams * max_tokens / (time.perf_counter() - start)
            first = statistics.median(each.first for each in times) * 1e3
            token = statistics.median(each.whole - each.first for each in times) / (max_tokens - 1)
            print(f"{streams:>7} {name:>7} {first:>13.1f} {token * 1e3:>13.2f} {rate:>9.0f}")


def main() -> None:
    """Serve, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=int, nargs="+", help="numbers of streams at once")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a measured stream")
    args, rest = parser.parse_known_args()
    options = vars(EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(rest))
    ray.init(address=options.pop("ray_address", None), log_to_driver=False)
    handle = serve.run(Engine.bind(options), route_prefix="/generate")
    if args.measure is None:
        print(f"serving at {URL}", flush=True)
        try:
            asyncio.run(asyncio.Event().wait())
        except KeyboardInterrupt:
            return
    print("streams     way  TTFT p50 (ms)  a token (ms)  tokens/s")
    for streams in args.measure:
        asyncio.run(measure(handle, streams, args.tokens))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
