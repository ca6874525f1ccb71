"""Measure the parts of an engine's start on a GPU in seconds, and which process compiled kernels.

    python benchmarks/starts/start_profile.py [--models qwen3-0.6b ...]

Each model starts twice: with an empty kernel cache (cold) and with the cache that the first start
left behind (warm). First the whole engine starts, from the creation of the process to ready. Then,
with a cache of its own, a worker starts alone, and this script times its parts. It differs from the
engine's worker only in that it waits for the device after each part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.executor.runner.runner import WorkerArgs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PARTS = {
    "gpu_runner.StepMemory": "tables",
    "gpu_runner.StepPacker": "buffers for messages",
    "gpu_runner.LastStage": "memory of the last stage",
    "gpu_model.LoadedModel": "model",
    "gpu_model.StepKernels": "attention and its cache",
    "gpu_model.capture_steps": "graphs",
    "gpu_runner.GpuRunner._run": "largest steps",
    "warm_up.wait_for_compiler": "waiting for the compiler",
    "warm_up.launch_all": "kernels from the cache, or given to threads",
}
"""Functions and classes of executor/gpu, with what they do while the worker starts."""


def worker_args(model: str, folder: str) -> WorkerArgs:
    """Return the arguments of a worker of a benchmark's model, with default options."""
    from benchmarks.workloads import write_model
    from sidestep.executor.runner.runner import WorkerArgs
    from sidestep.ipc.config_sections import (
        CacheConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from sidestep.ipc.model.model_spec import load_model_spec

    path = write_model(model, folder)
    spec = load_model_spec(path)
    return WorkerArgs(
        rank=0,
        spec=spec,
        model=ModelConfig(model=path, load_format="dummy"),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        max_model_len=spec.max_position_embeddings,
    )


class Laps:
    """Seconds of each part, in the order in which the parts end.

    The time of a part within another one is not counted in the outer one.
    """

    def __init__(self, born: float) -> None:
        self._born = born
        self._seconds: dict[str, float] = {}
        self._inner = [0.0]
        self.add("interpreter and imports before torch", time.time() - born)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a part."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def part(self, name: str, synchronize: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Time a part; `synchronize` is called at its end."""
        self._inner.append(0.0)
        start = time.perf_counter()
        yield
        synchronize()
        seconds = time.perf_counter() - start
        self.add(name, seconds - self._inner.pop())
        self._inner[-1] += seconds

    def around(
        self, function: Callable[..., Any], name: str, synchronize: Callable[[], object]
    ) -> Callable[..., Any]:
        """Return the function with its calls timed as a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name, synchronize):
                return function(*args, **kwargs)

        return timed

    def print(self) -> None:
        """Print all parts and the sum."""
        for name, seconds in self._seconds.items():
            print(f"    {seconds:7.2f} s  {name}")
        print(f"    {time.time() - self._born:7.2f} s  in all")


def run_worker(model: str, born: float) -> None:
    """Start a worker, with the process that compiles beside it, and print the parts."""
    from sidestep.executor.processes.kernel_compiler import CompilerArgs
    from sidestep.executor.processes.torch_import import import_torch
    from sidestep.executor.processes.worker import begin_beside_torch
    from sidestep.ipc.config import available_cores
    from sidestep.ipc.processes.process import spawn

    laps = Laps(born)
    with tempfile.TemporaryDirectory() as folder:
        args = worker_args(model, folder)
        compiled, compiling = os.pipe()
        compiler = spawn(
            "kernel compiler",
            "sidestep.executor.processes.kernel_compiler:main",
            CompilerArgs(worker=args, num_processes=available_cores()),
            pass_fds=(compiling,),
        )
        ended: list[float] = []
        compiler.on_death(lambda cause: ended.append(time.time() - born))
        os.close(compiling)
        with laps.part("import torch"):
            begin_beside_torch(args)
            import_torch()
            import torch
        with laps.part("import the runner"):
            import triton

            from sidestep.executor.gpu import gpu_runner
            from sidestep.executor.models.decoder import DecoderForCausalLM
            from sidestep.kernels.triton_key import compute_key
        with laps.part("rest of what was begun beside torch: Triton's own code"):
            compute_key()
        with laps.part("rest of what was begun beside torch: the GPU's context"):
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        wait = torch.cuda.synchronize
        for path, name in PARTS.items():
            module, _, inner = path.partition(".")
            *owners, last = inner.split(".")
            owner = import_module(f"sidestep.executor.gpu.{module}")
            for each in owners:
                owner = getattr(owner, each)
            setattr(owner, last, laps.around(getattr(owner, last), name, wait))
        decoder: Any = DecoderForCausalLM
        decoder.warm_up = laps.around(decoder.warm_up, "products of all sizes once", wait)
        found: list[tuple[str, bool]] = []
        triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append(
            (src.name, cache_hit)
        )
        with laps.part("rest of loading, with what threads compile", wait):
            gpu_runner.GpuRunner(args_with(args, compiled))
        laps.print()
    missing = sorted(name for name, cached in found if not cached)
    print(
        "    the compiler's process ended after "
        f"{', '.join(f'{s:.2f} s' for s in ended) or 'the worker'}; of "
        f"{len(found)} kernels this process compiled {len(missing)}: {', '.join(missing) or 'none'}"
    )


def args_with(args: WorkerArgs, compiled: int) -> WorkerArgs:
    """Return the arguments with the pipe on which the compiler's process reports."""
    from dataclasses import replace

    return replace(args, compiled=compiled)


def run_engine(model: str, born: float) -> None:
    """Start an engine and print the seconds to ready."""
    from benchmarks.workloads import write_model
    from sidestep import DEFAULT_MODEL, LLM

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(model, folder)
        with LLM(path, tokenizer=DEFAULT_MODEL, load_format="dummy"):
            print(f"    {time.time() - born:7.2f} s  from the creation of the process to ready")


def main() -> None:
    """Profile the chosen models, cold and warm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--child", choices=("engine", "worker"))
    parser.add_argument("--born", type=float)
    args = parser.parse_args()
    if args.child:
        (run_engine if args.child == "engine" else run_worker)(args.models[0], args.born)
        return
    from benchmarks.starts.bytecode import write_bytecode

    write_bytecode()
    for model in args.models:
        for child in ("engine", "worker"):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    print(f"{model}, {child}, {state}", flush=True)
                    command = [
                        sys.executable,
                        __file__,
                        "--models",
                        model,
                        "--child",
                        child,
                        "--born",
                    ]
                    subprocess.run(
                        [*command, repr(time.time())],
                        env={**os.environ, "TRITON_CACHE_DIR": cache},
                        check=True,
                    )


if __name__ == "__main__":
    main()
