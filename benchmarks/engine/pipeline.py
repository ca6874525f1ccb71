"""Measure the gain of a pipeline: the same model as one stage and as several.

Several stages work on different steps at the same time.

    python benchmarks/engine/pipeline.py [--stages 2] [--step-ms 10] [--streams 32] [--tokens 200]
        [--json FILE]
    python benchmarks/engine/pipeline.py --device cpu --cpu-threads 1 --model DIR
        [--load-format dummy] [--stages 2]
    python benchmarks/engine/pipeline.py --device cuda --model DIR [--load-format dummy]
        [--stages 2] [--streams 256]

The fake device takes --step-ms for a step in each stage, and the sum of that as a single stage. So
a pipeline of N stages can finish at most N times as many steps, and any shortfall is the engine's
alone. It gets N times as many streams, so that its steps have as many rows. Other devices get
--streams in any case, and are compared by tokens. The script prints a table. With --check it exits
with 1 when a fake pipeline reaches less than 95% of the best, or when any token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from sidestep import DEFAULT_MODEL, AsyncLLM, EngineArgs, SamplingParams


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    steps_per_s: float
    tokens_per_s: float
    itl_ms: float
    """Mean time between two tokens of a stream, in milliseconds."""


async def run(
    args: argparse.Namespace, name: str, streams: int, options: dict[str, Any]
) -> tuple[Result, list[list[int]]]:
    """Run all streams at once, each of the same length."""
    engine_args = EngineArgs(
        **{
            "model": args.model,
            "load_format": args.load_format,
            "tokenizer": args.tokenizer,
            "device": args.device,
            "cpu_threads": args.cpu_threads,
            "max_num_seqs": streams,
            "max_num_batched_tokens": max(2048, streams),
            **options,
        }
    )
    params = SamplingParams(
        max_tokens=args.tokens, ignore_eos=True, temperature=0.0, detokenize=False
    )
    async with AsyncLLM.from_engine_args(engine_args) as llm:

        async def stream(index: int) -> list[int]:
            tokens: list[int] = []
            async for out in llm.generate([10 + index % 100, 11 + index // 100, 12], params):
                tokens = list(out.outputs[0].token_ids)
            return tokens

        await asyncio.gather(*(stream(i) for i in range(4)))  # first use of everything
        before, start = (await llm.get_stats())["num_steps"], time.perf_counter()
        tokens = await asyncio.gather(*(stream(i) for i in range(streams)))
        wall, steps = time.perf_counter() - start, (await llm.get_stats())["num_steps"] - before
    return Result(
        name=name,
        steps_per_s=steps / wall,
        tokens_per_s=sum(map(len, tokens)) / wall,
        itl_ms=wall / args.tokens * 1e3,
    ), tokens


def main() -> int:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="fake", choices=("fake", "cpu", "cuda"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokenizer")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 unless the pipeline does its work"
    )
    args = parser.parse_args()
    fake, stages = args.device == "fake", args.stages
    many = args.streams * (stages if fake else 1)
    one_ms, stage_ms = (
        {"fake_step_ms": ms} if fake else {} for ms in (args.step_ms * stages, args.step_ms)
    )
    runs = [
        asyncio.run(run(args, name, streams, options))
        for name, streams, options in (
            ("one stage", args.streams, one_ms),
            (f"{stages} stages", many, {"pipeline_parallel_size": stages, **stage_ms}),
            (
                f"{stages} stages, no overlap",
                many,
                {"pipeline_parallel_size": stages, "async_scheduling": False, **stage_ms},
            ),
        )
    ]
    results, base = [result for result, _ in runs], runs[0][0]
    device = f"fake stages of {args.step_ms} ms" if fake else args.device
    print(
        f"{args.streams} streams x {args.tokens} tokens for one stage, {many} for {stages}; "
        f"{device}"
    )
    print(f"{'':>22} {'steps/s':>9} {'tokens/s':>10} {'ITL ms':>8} {'tokens/s ratio':>15}")
    for result in results:
        print(
            f"{result.name:>22} {result.steps_per_s:>9.1f} {result.tokens_per_s:>10.0f} "
            f"{result.itl_ms:>8.2f} {result.tokens_per_s / base.tokens_per_s:>15.3f}"
        )
    same = all(tokens[: args.streams] == runs[0][1] for _, tokens in runs)
    print(f"tokens equal in all: {same}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    good = same and (not fake or results[1].tokens_per_s >= 0.95 * stages * base.tokens_per_s)
    return 0 if good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
