"""Measure the seconds of compilation of each kernel that an engine's start needs, without a GPU.

    python benchmarks/kernels/compile_cost.py [--models qwen3-0.6b ...] [--capability 90]
        [--processors 132] [--by-kernel]

Kernels are compiled one after the other, in one thread, with an empty cache. "front" is Triton's
reading of Python code, "passes" its own transformations, "llvm" the step from there to LLVM's code,
"ptx" and "cubin" the outputs. "cpu" is the CPU time of this process and of the assembler together;
the others are wall-clock times. Where Triton compiles a C function to launch a kernel, its time
comes on top: it has a column where there is a driver to link the function to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
STAGES = {
    "front": (),
    "passes": ("ttir", "ttgir", "glir"),
    "llvm": ("llir",),
    "ptx": ("ptx",),
    "cubin": ("cubin",),
}


@dataclass
class Cost:
    """Seconds of compilation of one kernel with arguments of one kind, or of several."""

    number: int = 0
    cpu: float = 0.0
    launcher: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def add(self, other: Cost) -> None:
        """Add another cost to this one."""
        self.number += other.number
        self.cpu += other.cpu
        self.launcher += other.launcher
        for name, seconds in other.stages.items():
            self.stages[name] += seconds


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class OneByOne(Executor):
    """Executor that compiles at once and records the costs."""

    def __init__(self) -> None:
        self.costs: list[tuple[str, Cost]] = []
        self._now = Cost()

    def submit(self, compilation: Any, /, *_: Any, **__: Any) -> Future[Any]:
        """Compile a kernel now and record its cost."""
        from sidestep.executor.gpu.cuda_driver import has_driver
        from sidestep.kernels.compiling import with_launcher

        self._now = Cost(number=1)
        begin = cpu_seconds()
        kernel = compilation()
        self._now.cpu = cpu_seconds() - begin
        if has_driver():
            start = time.perf_counter()
            with_launcher(kernel)
            self._now.launcher = time.perf_counter() - start
        self.costs.append((f"{kernel.name} ({kernel.metadata.num_warps} warps)", self._now))
        done: Future[Any] = Future()
        done.set_result(kernel)
        return done

    def listen(self, *, times: Any, **_: Any) -> None:
        """Record Triton's own times, which it gives in microseconds."""
        self._now.stages["front"] = times.ir_initialization / 1e6
        for stage, spent in times.lowering_stages:
            self._now.stages[next(name for name, stages in STAGES.items() if stage in stages)] += (
                spent / 1e6
            )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Set Triton's cache to an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        yield


def compile_model(name: str, capability: int, processors: int) -> list[tuple[str, Cost]]:
    """Return the costs of the kernels of an engine with default options."""
    import triton

    from benchmarks.starts.start_profile import worker_args
    from sidestep.executor.gpu.warm_up import launch_without_gpu
    from sidestep.executor.parallel.parallel_state import LoneRank
    from sidestep.kernels.compiling import compile_for, compiling_only
    from sidestep.kernels.gpu import Gpu

    compiler = OneByOne()
    with tempfile.TemporaryDirectory() as folder, empty_cache():
        compile_for(Gpu(capability, processors))
        triton.knobs.compilation.listener = compiler.listen
        with compiling_only(compiler):
            launch_without_gpu(worker_args(name, folder), LoneRank(0, 1))
    return compiler.costs


def print_table(model: str, costs: list[tuple[str, Cost]], by_kernel: bool) -> None:
    """Print a model's kernels, the most expensive first, and their sum."""
    total, kernels = Cost(), dict[str, Cost]()
    for kernel, cost in costs:
        total.add(cost)
        kernels.setdefault(kernel.split()[0], Cost()).add(cost)
    rows = (
        sorted(kernels.items(), key=lambda e: -e[1].cpu)
        if by_kernel
        else sorted(costs, key=lambda e: -e[1].cpu)
    )
    print(
        f"{model:28} {'number':>6}" + "".join(f"{name:>9}" for name in (*STAGES, "cpu", "launcher"))
    )
    for kernel, cost in [*rows, ("all", total)]:
        figures = (*cost.stages.values(), cost.cpu, cost.launcher)
        print(f"{kernel:28} {cost.number:6}" + "".join(f"{seconds:9.2f}" for seconds in figures))


def main() -> None:
    """Print the tables of the chosen models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument(
        "--by-kernel", action="store_true", help="one line for all variants of a kernel"
    )
    args = parser.parse_args()
    if len(args.models) == 1:
        print_table(
            args.models[0],
            compile_model(args.models[0], args.capability, args.processors),
            args.by_kernel,
        )
    for model in args.models if len(args.models) > 1 else ():
        # Each model gets a process of its own, which has compiled nothing yet.
        subprocess.run([sys.executable, *sys.argv, "--models", model], check=True)


if __name__ == "__main__":
    main()
