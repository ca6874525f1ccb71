"""`sidestep compile-kernels`, which compiles an engine's kernels on a machine without its GPU.

Images of containers are built on such machines. An engine in the container then starts without
compiling.
"""

from __future__ import annotations

import argparse
import time

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.common.logs import own_process, tell
from sidestep.ipc.config import available_cores
from sidestep.ipc.processes.kernel_job import KERNEL_COMPILER, PROCESSORS, KernelJob
from sidestep.ipc.processes.process import spawn

_LOOK_S = 1.0
"""Seconds after which the command looks whether the process has ended."""


def run_compile_kernels(parsed: argparse.Namespace) -> int:
    """Run `sidestep compile-kernels` and return its exit status."""
    capability, processors = parsed.capability, parsed.processors
    if processors is not None and processors < 1:
        raise ValidationError("processors", f"must be at least 1, not {processors}")
    arguments = EngineArgs.from_cli_args(parsed)
    if arguments.device not in ("auto", "cuda"):
        raise ValidationError("device", f"{arguments.device!r} has no kernels that are compiled")
    own_process()
    start = time.perf_counter()
    tell(f"compiling the kernels of {arguments.model} for sm_{capability} ...")
    job = KernelJob(
        config=arguments.create_engine_config(with_weights=False),
        capability=capability,
        processors=processors or PROCESSORS[capability],
        num_processes=available_cores(),
    )
    compiler = spawn("kernel compiler", KERNEL_COMPILER, job, env={"OMP_NUM_THREADS": "1"})
    try:
        while not compiler.wait(_LOOK_S):
            pass
    finally:
        compiler.stop()
    status = compiler.exit_status
    if status is not None and status < 0:
        raise EngineStartError(compiler.death_cause())
    if status == 0:
        tell(f"done in {time.perf_counter() - start:.1f} s")
    return 0 if status == 0 else 1
