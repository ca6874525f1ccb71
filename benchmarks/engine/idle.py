"""Measure the CPU time of all processes of an idle engine, with a model loaded and no request.

python benchmarks/engine/idle.py [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio

import psutil

from sidestep import AsyncLLM, EngineArgs, SamplingParams


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time so far of this process and its children."""
    own = psutil.Process()
    return {
        f"{p.pid} {p.cmdline()[-1][:30]}": sum(p.cpu_times()[:2])
        for p in (own, *own.children(recursive=True))
    }


async def measure(seconds: float) -> dict[str, float]:
    """Return each process's share of one core, after one request has been served."""
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        async for _ in llm.generate("def get_name(", SamplingParams(max_tokens=16)):
            pass
        before = cpu_seconds()
        await asyncio.sleep(seconds)
        after = cpu_seconds()
    return {name: (after[name] - before[name]) / seconds for name in after}


def main() -> None:
    """Print a line for each process and the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    shares = asyncio.run(measure(args.seconds))
    for name, share in shares.items():
        print(f"{share:8.3%}  {name}")
    print(f"{sum(shares.values()):8.3%}  of one core in all, over {args.seconds:.0f} s")


if __name__ == "__main__":
    main()
