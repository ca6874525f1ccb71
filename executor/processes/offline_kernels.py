"""The process of `sidestep compile-kernels`, which fills Triton's cache without a GPU.

It leaves there the files that the process beside a starting worker would leave
(executor/processes/kernel_compiler.py). So an engine that starts with the same options, on such a
GPU and with that folder as its cache, compiles nothing.
"""

from __future__ import annotations

import logging
import sys

from sidestep.executor.processes.kernel_compiler import Note, cache_folder, compile_ahead
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.logs import tell
from sidestep.ipc.processes.kernel_job import KernelJob
from sidestep.ipc.processes.process import decode_args
from sidestep.kernels.gpu import Gpu


def main(raw: bytes) -> None:
    """Run the process. The exit status is 1, after a line that says why, if a kernel is missing."""
    job = decode_args(raw, KernelJob)
    args, gpu = WorkerArgs.of(job.config, rank=0), Gpu(job.capability, job.processors)
    try:
        compile_ahead(args, gpu, job.num_processes)
        count = len(Note(args, gpu).files())
    except Exception as error:
        tell(
            f"sidestep: the kernels cannot be compiled: {type(error).__name__}: {error}",
            logging.ERROR,
        )
        sys.exit(1)
    tell(f"{count} kernels for sm_{gpu.capability} are in {cache_folder()}")
