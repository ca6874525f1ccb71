"""How busy overlap keeps the device: the same load on the fake device with overlap on and off, in one run.

    python benchmarks/overlap.py [--step-ms 10] [--streams 64] [--tokens 200] [--json FILE]

The fake device takes exactly --step-ms for a step, so busy / (busy + idle while there was work) is the engine's doing
alone. Prints a table; with --check exits with 1 when overlap keeps the device less than 97% busy, or when it makes no
difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    overlap: str
    device_busy: float
    """Share of the time with work during which the device ran."""
    tokens_per_s: float
    step_ms: float
    """Wall time of a step, the device's time included."""


async def run_load(args: argparse.Namespace, overlap: bool) -> tuple[Result, list[list[int]]]:
    """All streams at once, each of the same length."""
    engine_args = EngineArgs(device="fake", fake_step_ms=args.step_ms, async_scheduling=overlap,
                             max_num_seqs=args.streams, max_num_batched_tokens=max(2048, args.streams))
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=1, temperature=1.0,
                            output_kind=RequestOutputKind.DELTA)
    async with AsyncLLM.from_engine_args(engine_args) as llm:
        async def stream(index: int) -> list[int]:
            tokens: list[int] = []
            async for out in llm.generate([10 + index, 11, 12], params):
                tokens += out.outputs[0].token_ids
            return tokens

        await asyncio.gather(*(stream(i) for i in range(4)))  # first use of everything
        before, start = await llm.get_stats(), time.perf_counter()
        tokens = await asyncio.gather(*(stream(i) for i in range(args.streams)))
        wall, after = time.perf_counter() - start, await llm.get_stats()
    busy = after["device_busy_s"] - before["device_busy_s"]
    idle = after["device_idle_s"] - before["device_idle_s"]
    return Result(overlap="on" if overlap else "off", device_busy=busy / (busy + idle),
                  tokens_per_s=sum(map(len, tokens)) / wall, step_ms=wall / args.tokens * 1e3), tokens


def main() -> int:
    """Runs both, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless overlap does its work")
    args = parser.parse_args()
    (on, on_tokens), (off, off_tokens) = (asyncio.run(run_load(args, overlap)) for overlap in (True, False))
    print(f"{args.streams} streams x {args.tokens} tokens, device step {args.step_ms} ms")
    print(f"{'overlap':>8} {'device busy':>12} {'tokens/s':>10} {'step ms':>9}")
    for result in (on, off):
        print(f"{result.overlap:>8} {result.device_busy:>12.1%} {result.tokens_per_s:>10.0f} {result.step_ms:>9.2f}")
    print(f"tokens equal with overlap on and off: {on_tokens == off_tokens}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(on), asdict(off)], file, indent=1)
    good = on.device_busy >= 0.97 and off.device_busy < on.device_busy - 0.01 and on_tokens == off_tokens
    return 0 if good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
