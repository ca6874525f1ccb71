"""A process that compiles a GPU worker's kernels while the worker starts.

Meanwhile the worker imports torch, makes its context and loads weights. This process needs no GPU
memory and no weights: tensors on torch's meta device stand for those of the worker, and the
worker's own code launches the kernels (executor/gpu/warm_up.py). So this process leaves in
Triton's cache exactly the kernels that the worker will look for. If a kernel is missing there,
because this process failed or was killed, the worker compiles it itself.

Order: if a note in Triton's cache says that all kernels are there, nothing else happens, not even
the import of torch. Otherwise the process launches the kernels, and each launch of a new kind is
compiled in a fork (executor/processes/forks.py). Then it writes the note. When the process ends,
for whatever reason, a pipe closes that the workers wait for (WorkerArgs.compiled). On a machine
where no engine has left a note, torch is imported while the driver is asked for the GPU.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sidestep.executor.gpu.cuda_driver import find_gpu
from sidestep.executor.processes.torch_without import do_without_long_imports
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.logs import tell
from sidestep.ipc.config import triton_environment
from sidestep.ipc.config_sections import ParallelConfig
from sidestep.ipc.processes.process import decode_args, uncollected_imports
from sidestep.kernels.gpu import Gpu
from sidestep.kernels.triton_key import compute_key

_NOTE = "sidestep-{}.json"


@dataclass(frozen=True, kw_only=True)
class CompilerArgs:
    """Arguments of the process, sent as JSON."""

    worker: WorkerArgs
    """Arguments of rank 0."""
    num_processes: int


def main(raw: bytes) -> None:
    """Run the process.

    A failure here is only logged: the engine goes on without kernels that were compiled ahead.
    """
    # Not at the top, like other imports: the core imports this file before it launches workers.
    from concurrent.futures import ThreadPoolExecutor

    args = decode_args(raw, CompilerArgs)
    try:
        with ThreadPoolExecutor(1) as thread:
            finding = thread.submit(find_gpu, args.worker.gpu_index)
            if not any(cache_folder().glob(_NOTE.format("*"))):
                _import_torch()
            gpu = finding.result()
        if gpu is not None:
            compile_ahead(args.worker, gpu, args.num_processes)
    except Exception as error:
        tell(
            f"sidestep: kernels are not compiled ahead: {type(error).__name__}: {error}",
            logging.WARNING,
        )


def compile_ahead(args: WorkerArgs, gpu: Gpu, num_processes: int) -> None:
    """Leave in Triton's cache the kernels that workers with these arguments will look for there."""
    note = Note(args, gpu)
    if note.holds():
        return
    with note.lock():  # one of the replicas' processes compiles
        if not note.holds():
            note.write(compile_all(args, gpu, num_processes))


class Note:
    """A file in Triton's cache that says that all kernels of an engine are there.

    Its name is a digest of everything that the kernels depend on.
    """

    def __init__(self, args: WorkerArgs, gpu: Gpu) -> None:
        self._path = cache_folder() / _NOTE.format(_digest(args, gpu))

    def holds(self) -> bool:
        """Return whether the note is there, and all files that it names."""
        try:
            return all(map(os.path.exists, self.files()))
        except (OSError, ValueError):
            return False

    def files(self) -> list[str]:
        """Return the paths in the note, one of each kernel. Raises OSError or ValueError."""
        found: list[str] = json.loads(self._path.read_bytes())
        return found

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold an exclusive lock on the note, which may wait for another process."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, files: Sequence[str]) -> None:
        """Write the note. files: one of each kernel."""
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(files))
        new.replace(self._path)


def cache_folder() -> Path:
    """Return the folder where Triton keeps compiled kernels.

    Triton's own knobs would say so too, but only after an import that takes a fifth of a second.
    """
    said = triton_environment()
    home = said.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(said.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def _digest(args: WorkerArgs, gpu: Gpu) -> str:
    """Return a digest of everything that kernels may depend on.

    It may cover more than that. If it covered less, the worker would only have to compile what is
    missing.
    """
    same = replace(
        args,
        rank=0,
        replica=0,
        start=0,
        after=(),
        rendezvous=None,
        listener=None,
        gpu=None,
        compiled=None,
        spec=msgspec.structs.replace(args.spec, path=""),
        model=replace(
            args.model,
            model="",
            tokenizer=None,
            tokenizer_mode="auto",
            chat_template=None,
            revision=None,
            load_format="auto",
            dummy_seed=0,
            logits_processors=None,
        ),
    )
    from importlib import metadata  # not at the top: see `main`

    found = hashlib.sha256(msgspec.json.encode((same, gpu, sys.version)))
    for package in ("torch", "triton"):
        found.update(metadata.version(package).encode())
    found.update(repr(sorted(triton_environment().items())).encode())
    here = Path(__file__).resolve().parents[1]
    for folder in (here, here.parent / "kernels"):
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.cu*")]):
            found.update(file.read_bytes())
    return found.hexdigest()


def compile_all(args: WorkerArgs, gpu: Gpu, num_processes: int) -> list[str]:
    """Compile what workers with these arguments launch, in up to `num_processes` processes.

    torch must not have been imported before. Returns a file of each kernel. Raises RuntimeError if
    a kernel could not be compiled.
    """
    reading = _import_torch()
    with uncollected_imports():
        from sidestep.executor.gpu.warm_up import launch_without_gpu
        from sidestep.executor.parallel.parallel_state import LoneRank
        from sidestep.executor.processes.forks import Forks
        from sidestep.kernels.compiling import compile_for, compiling_only

    compile_for(gpu)
    reading.join()
    forks, size = Forks(num_processes), args.parallel.tensor_parallel_size
    with compiling_only(forks):
        for rank in ranks_that_differ(args.parallel):
            launch_without_gpu(replace(args, rank=rank), LoneRank(rank % size, size))
    return forks.finish()


def ranks_that_differ(parallel: ParallelConfig) -> list[int]:
    """Return the ranks that launch different kernels, those that take longest first.

    In a pipeline these are the last stage, which also samples, the first stage and one stage
    between them. Within a stage they are rank 0, which adds what must be added once, and one of the
    other ranks.
    """
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return [
        stage * size + rank
        for stage in sorted({0, min(1, stages - 1), stages - 1}, reverse=True)
        for rank in range(min(2, size))
    ]


@functools.cache
def _import_torch() -> threading.Thread:
    """Import torch, and return the thread in which Triton reads its own code meanwhile."""
    thread = threading.Thread(target=compute_key)
    thread.start()
    do_without_long_imports()
    with uncollected_imports():
        importlib.import_module("torch")
    return thread
