"""A process that compiles a GPU worker's kernels while the worker imports torch, makes its context
and loads weights.

It needs no GPU memory and no weights: tensors on torch's meta device stand for those of the worker,
whose own code launches the kernels (GpuRunner.launch_without_gpu). So what it leaves in Triton's
cache is what the worker will look for. What is missing there, because this process failed or was
killed, the worker compiles itself.

Order: if a note in Triton's cache says that all is there, nothing else happens, not even the import
of torch. Else it launches, and each launch of a new kind is compiled in a fork
(executor/gpu/forks.py). Then it leaves the note. Its end, however it comes, closes a pipe that the
workers wait for (WorkerArgs.compiled).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from sidestep.executor.gpu.cuda_driver import find_gpu
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.logs import tell
from sidestep.ipc.config import triton_environment
from sidestep.ipc.config_sections import ParallelConfig
from sidestep.ipc.processes.process import decode_args
from sidestep.kernels.gpu import Gpu


@dataclass(frozen=True, kw_only=True)
class CompilerArgs:
    """What the process gets as JSON."""

    worker: WorkerArgs
    """Of rank 0."""
    num_processes: int


def main(raw: bytes) -> None:
    """Entry point of the process. Its failure is no fault of the engine, which goes on without
    it.
    """
    args = decode_args(raw, CompilerArgs)
    try:
        gpu = find_gpu(args.worker.gpu_index)
        if gpu is not None:
            compile_ahead(args.worker, gpu, args.num_processes)
    except Exception as error:
        tell(
            f"sidestep: kernels are not compiled ahead: {type(error).__name__}: {error}",
            logging.WARNING,
        )


def compile_ahead(args: WorkerArgs, gpu: Gpu, num_processes: int) -> None:
    """Leaves in Triton's cache what workers with these arguments will look for there."""
    note = Note(args, gpu)
    if note.holds():
        return
    with note.lock():  # of several replicas' processes one compiles
        if not note.holds():
            note.write(compile_all(args, gpu, num_processes))


class Note:
    """Says that all kernels of an engine are in Triton's cache: a file there, with a name for what
    they depend on.
    """

    def __init__(self, args: WorkerArgs, gpu: Gpu) -> None:
        self._path = cache_folder() / f"sidestep-{_digest(args, gpu)}.json"

    def holds(self) -> bool:
        """Whether it is there, and all that it names."""
        try:
            return all(map(os.path.exists, json.loads(self._path.read_bytes())))
        except (OSError, ValueError):
            return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else has it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, files: Sequence[str]) -> None:
        """files: of each kernel."""
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(files))
        new.replace(self._path)


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled. Its own knobs would say so, after an import of a
    fifth of a second.
    """
    said = triton_environment()
    home = said.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(said.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def _digest(args: WorkerArgs, gpu: Gpu) -> str:
    """Of what kernels may depend on, or more than that: too little would only have the worker
    compile.
    """
    same = replace(
        args,
        rank=0,
        replica=0,
        rendezvous=None,
        compiled=None,
        spec=msgspec.structs.replace(args.spec, path=""),
        model=replace(
            args.model,
            model="",
            tokenizer=None,
            revision=None,
            load_format="auto",
            dummy_seed=0,
            logits_processors=None,
        ),
    )
    import importlib.metadata  # the core imports this file, and has no time for it

    found = hashlib.sha256(msgspec.json.encode((same, gpu, sys.version)))
    for package in ("torch", "triton"):
        found.update(importlib.metadata.version(package).encode())
    found.update(repr(sorted(triton_environment().items())).encode())
    here = Path(__file__).resolve().parents[1]
    for folder in (here, here.parent / "kernels"):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def compile_all(args: WorkerArgs, gpu: Gpu, num_processes: int) -> list[str]:
    """Compiles in so many processes what workers with these arguments launch; no torch before this.
    Returns a file of each kernel. Raises RuntimeError if one could not be compiled.
    """
    thread = threading.Thread(target=_know_triton)
    thread.start()
    _do_without_dynamo()
    from sidestep.executor.gpu.forks import Forks
    from sidestep.executor.gpu.gpu_runner import GpuRunner
    from sidestep.executor.parallel.parallel_state import LoneRank
    from sidestep.kernels.compiling import compile_for, compiling_only

    compile_for(gpu)
    thread.join()
    forks, size = Forks(num_processes), args.parallel.tensor_parallel_size
    with compiling_only(forks):
        for rank in ranks_that_differ(args.parallel):
            GpuRunner.launch_without_gpu(replace(args, rank=rank), LoneRank(rank % size, size))
    return forks.finish()


def ranks_that_differ(parallel: ParallelConfig) -> list[int]:
    """In what they launch. Of a pipeline the last stage, which also samples, the first and one
    between them; of a stage rank 0, which adds what must be added once, and one of the others. What
    takes longest comes first.
    """
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return [
        stage * size + rank
        for stage in sorted({0, min(1, stages - 1), stages - 1}, reverse=True)
        for rank in range(min(2, size))
    ]


def _do_without_dynamo() -> None:
    """torch's meta functions that are written in Python ask its compiler not to look at them, and
    the import of that takes seconds. Nothing else here needs it.
    """
    stand_in: Any = ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function
    sys.modules["torch._dynamo"] = stand_in


def _know_triton() -> None:
    from sidestep.kernels.compiling import know_triton

    know_triton()
