"""Measure the memory and the speed of a CPU worker over many short requests of all lengths.

    python benchmarks/host/worker_memory.py [--requests 30000] [--concurrency 64] [--every 3000]
        [--option num_kv_blocks=512]

Each request has another prompt, of 1 to 60 tokens, and 1 to 16 output tokens, so steps have all
sizes. After each `--every` requests, print the resident memory of each process in MB, and the
requests and tokens a second since the line before. The worker's memory beside its KV cache must not
grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import psutil

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from sidestep.frontend.api.event_loop import new_event_loop


class Load:
    """Source of random requests, which counts the requests and tokens that are done."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self._llm = llm
        self._rng = random.Random(0)
        self.num_left = count
        self.num_done = self.num_tokens = 0

    async def serve(self) -> None:
        """Send one request after the other, until none is left."""
        vocab = self._llm.get_tokenizer().vocab_size
        while self.num_left:
            self.num_left -= 1
            prompt = [self._rng.randrange(3, vocab) for _ in range(self._rng.randint(1, 60))]
            params = SamplingParams(
                max_tokens=self._rng.randint(1, 16),
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in self._llm.generate(prompt, params):
                self.num_tokens += len(output.outputs[0].token_ids)
            self.num_done += 1

    async def watch(self, every: int) -> None:
        """Print a line after each `every` requests."""
        processes = {name: psutil.Process(pid) for name, pid in self._llm.pids.items()}
        print(
            f"{'requests':>9}"
            + "".join(f"{name:>10}" for name in processes)
            + "  requests/s  tokens/s"
        )
        done, tokens, since = 0, 0, time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            if self.num_done - done < every and self.num_left:
                continue
            now = time.monotonic()
            sizes = "".join(
                f"{process.memory_info().rss / 1e6:10.0f}" for process in processes.values()
            )
            print(
                f"{self.num_done:9}{sizes}{(self.num_done - done) / (now - since):12.0f}"
                f"{(self.num_tokens - tokens) / (now - since):10.0f}",
                flush=True,
            )
            done, tokens, since = self.num_done, self.num_tokens, now
            if not self.num_left:
                return


async def run(args: argparse.Namespace) -> None:
    """Serve the load with an engine of the given options, and watch its memory."""
    options = {
        name: json.loads(value)
        for name, _, value in (option.partition("=") for option in args.option)
    }
    async with AsyncLLM.from_engine_args(EngineArgs(**({"device": "cpu"} | options))) as llm:
        load = Load(llm, args.requests)
        await asyncio.gather(
            load.watch(args.every), *(load.serve() for _ in range(args.concurrency))
        )


def main() -> None:
    """Run the load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--every", type=int, default=3_000)
    parser.add_argument(
        "--option", action="append", default=[], help="name=value, for the engine; values are JSON"
    )
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(args))


if __name__ == "__main__":
    main()
