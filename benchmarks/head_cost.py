"""Measure the CPU time that the head spends on a token and on a replica.

    python benchmarks/head_cost.py [--placer local|join|ray] [--replicas 1 2 4] [--streams 32]
        [--step-ms 20] [--tokens 200] [--json FILE]

The head is the process that has the AsyncLLM: it routes, detokenises and delivers for all replicas.
The fake device gives each of the streams of a replica a token a step. The figures are of the head's
process alone, all its threads: CPU time for a token, the share of a core for a replica with that
load and for an idle one, and the number of replicas with which one core would be full. One
interpreter runs on one core, so that is where a head is full; more heads join with
--api-server-count. `benchmarks/server_cost.py` has what HTTP costs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.placers import PLACERS, placed
from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Row:
    """The head's cost with a number of replicas."""

    replicas: int
    tokens_per_s: float
    cpu_us_per_token: float
    idle_share: float
    """Share of a core that an idle replica costs."""
    busy_share: float
    """Share of a core that a replica with this load costs."""

    @property
    def full_at(self) -> int:
        """Number of replicas with this load that fill one core."""
        return int(1 / self.busy_share)


async def share_of_core(seconds: float) -> float:
    """Return the share of a core that this process uses while it does nothing itself."""
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


async def measure(args: argparse.Namespace, replicas: int, options: dict[str, Any]) -> Row:
    """Run the load on an engine with this number of replicas."""
    engine_args = EngineArgs(
        device="fake",
        fake_step_ms=args.step_ms,
        data_parallel_size=replicas,
        max_num_seqs=args.streams,
        max_num_batched_tokens=max(2048, args.streams),
        routing="least_loaded",
        **options,
    )
    params = SamplingParams(
        max_tokens=args.tokens,
        ignore_eos=True,
        temperature=0,
        output_kind=RequestOutputKind.DELTA,
    )
    async with AsyncLLM.from_engine_args(engine_args) as llm:

        async def stream(index: int) -> int:
            num = 0
            async for out in llm.generate([10 + index % 100, 11, 12], params):
                num += len(out.outputs[0].token_ids)
            return num

        async def load() -> int:
            return sum(await asyncio.gather(*map(stream, range(args.streams * replicas))))

        await load()  # first use of everything
        idle = await share_of_core(args.idle_s)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = await load()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Row(
        replicas=replicas,
        tokens_per_s=tokens / wall,
        cpu_us_per_token=cpu / tokens * 1e6,
        idle_share=idle / replicas,
        busy_share=cpu / wall / replicas,
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placer", default="local", choices=PLACERS)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=32, help="streams of each replica")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    rows = []
    for replicas in args.replicas:
        with placed(args.placer, replicas) as options:
            rows.append(asyncio.run(measure(args, replicas, options)))
    print(
        f"placer {args.placer}, {args.streams} streams x {args.tokens} tokens a replica, steps of "
        f"{args.step_ms} ms"
    )
    print("replicas  tokens/s  CPU us/token  idle replica  busy replica  one core is full at")
    for row in rows:
        print(
            f"{row.replicas:>8} {row.tokens_per_s:>9.0f} {row.cpu_us_per_token:>13.1f} "
            f"{row.idle_share:>13.2%} {row.busy_share:>13.1%} {row.full_at:>20}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
