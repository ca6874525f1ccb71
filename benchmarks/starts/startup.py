"""Measure the time from process start to the first token with the bundled model.

    python benchmarks/starts/startup.py [--runs 3]

Each run is a fresh process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

SCRIPT = """
import asyncio, time
from sidestep import AsyncLLM, EngineArgs, SamplingParams
async def main():
    llm = AsyncLLM.from_engine_args(EngineArgs())
    print('ready', time.time(), flush=True)
    async for out in llm.generate('def get_name(', SamplingParams(max_tokens=1)):
        print('first', time.time(), flush=True)
    llm.shutdown()
asyncio.run(main())
"""
TORCH = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"


def main() -> None:
    """Print seconds for each run and, for comparison, those of torch's import alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"{'run':>4} {'ready s':>9} {'first token s':>14} {'import torch alone s':>21}")
    for run in range(args.runs):
        alone = subprocess.run(
            [sys.executable, "-c", TORCH], capture_output=True, text=True, check=True
        )
        start = time.time()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
        )
        times = {
            name: float(at) - start
            for name, at in (line.split() for line in done.stdout.splitlines())
        }
        print(
            f"{run:>4} {times['ready']:>9.2f} {times['first']:>14.2f} {float(alone.stdout):>21.2f}"
        )


if __name__ == "__main__":
    main()
