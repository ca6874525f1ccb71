"""Compilation ahead, without a GPU, in a process of its own (see compile_kernels.py).

Arguments: `MODEL COMMAND [SIZES]`. `keys` prints in JSON two lists of the kernels to compile for
each of SIZES, a JSON list of (ranks, stages, drafts): for tensors without memory, as
executor/processes/kernel_compiler.py uses them, and for tensors with memory, on the CPU, with a
cache of many blocks. `sizes` prints the kernels that are compiled ahead, and those that a worker
launches beside them when it loads the products of all sizes. `ahead` compiles, as the process
beside a starting worker does. `worker` compiles too, in threads as a worker does, and prints for
each kernel whether it was in Triton's cache. `holds`, with the options of an engine, prints whether
the process beside its starting worker would find all kernels there.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import triton

from sidestep.executor.gpu import warm_up
from sidestep.executor.gpu.gpu_setup import GpuSetup
from sidestep.executor.gpu.step_kernels import StepKernels
from sidestep.executor.gpu.warm_up import launch_without_gpu
from sidestep.executor.parallel.parallel_state import LoneRank
from sidestep.executor.processes import kernel_compiler
from sidestep.executor.processes.kernel_compiler import CompilerArgs, Note, ranks_that_differ
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.frontend.main import make_parser
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.compiling import CompilerThreads, compile_for, compiling_only
from sidestep.kernels.gpu import Gpu

GPU = Gpu(90, 132)


def worker_args(
    path: str, dtype: str, ranks: int = 1, stages: int = 1, drafts: int = 0
) -> WorkerArgs:
    return WorkerArgs(
        rank=0,
        spec=load_model_spec(path),
        model=ModelConfig(model=path, dtype=dtype, load_format="dummy"),
        cache=CacheConfig(),
        parallel=ParallelConfig(
            attention_backend="triton", tensor_parallel_size=ranks, pipeline_parallel_size=stages
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=40,
            max_num_batched_tokens=200,
            speculative_config={"num_speculative_tokens": drafts} if drafts else None,
        ),
        max_model_len=200,
    )


def keys(path: str, ranks: int, stages: int, drafts: int) -> list[list[str]]:
    found: list[list[str]] = []

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[-1].append(f"{fn.name} {key}")
        return True  # enough: do not compile

    triton.knobs.runtime.jit_cache_hook = note
    for device, num_blocks in (("meta", 1), ("cpu", 37)):
        found.append([])
        compile_for(GPU, device)
        args = worker_args(path, "bfloat16", ranks, stages, drafts)
        for rank in ranks_that_differ(args.parallel):
            with CompilerThreads(1) as threads, compiling_only(threads):
                launch_without_gpu(
                    replace(args, rank=rank),
                    LoneRank(rank % ranks, ranks),
                    device=device,
                    num_blocks=num_blocks,
                )
    return [sorted(set(each)) for each in found]


class _Notes(Executor):
    """Notes forms of kernels in CUDA C++, and compiles nothing."""

    def __init__(self, found: list[list[str]]) -> None:
        self._found = found

    def submit(self, compilation: Any, /, *_: Any, **__: Any) -> Future[Any]:
        self._found[-1].append(str(compilation.args))
        done: Future[Any] = Future()
        done.set_result(None)
        return done


def sizes(path: str) -> list[list[str]]:
    found: list[list[str]] = [[]]

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found[-1].append(f"{fn.name} {key}")
        return True

    launch_all = warm_up.launch_all

    def all_and_sizes(setup: GpuSetup, memory: Any, parallel: Any, kernels: StepKernels) -> None:
        launch_all(setup, memory, parallel, kernels)
        found.append([])
        warm_up.load_products(setup, kernels)

    warm_up.launch_all = all_and_sizes
    triton.knobs.runtime.jit_cache_hook = note
    compile_for(GPU)
    args = worker_args(path, "float16")
    limits = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8448)
    with compiling_only(_Notes(found)):
        launch_without_gpu(replace(args, scheduler=limits, max_model_len=1000), LoneRank(0, 1))
    ahead, beside = (set(each) for each in found)
    return [sorted(ahead), sorted(beside - ahead)]


def worker(path: str) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    triton.knobs.compilation.listener = note
    compile_for(GPU, "cpu")
    with CompilerThreads(2) as threads, compiling_only(threads):
        launch_without_gpu(worker_args(path, "float32"), LoneRank(0, 1), device="cpu")
    return found


if __name__ == "__main__":
    model, command, *rest = sys.argv[1:]
    if command == "keys":
        print(json.dumps([keys(model, *sizes) for sizes in json.loads(rest[0])]))
    elif command == "holds":
        parser = make_parser("0")
        options = EngineArgs.from_cli_args(parser.parse_args(["serve", model, *rest]))
        started = WorkerArgs.of(options.create_engine_config(), rank=0)
        print(json.dumps(Note(started, GPU).holds()))
    elif command == "sizes":
        print(json.dumps(sizes(model)))
    elif command == "worker":
        print(json.dumps(worker(model)))
    else:
        args = worker_args(model, "float32")
        with patch.object(kernel_compiler, "find_gpu", lambda index: GPU):
            kernel_compiler.main(msgspec.json.encode(CompilerArgs(worker=args, num_processes=2)))
        assert Note(args, GPU).holds()
        algebra = sys.modules["sympy"]
        assert not hasattr(algebra, "__file__"), "the module takes a second to import"
