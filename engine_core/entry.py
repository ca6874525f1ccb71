"""Where the core's process begins: with its workers, which need longest."""

from __future__ import annotations

from sidestep.executor.base import Executor
from sidestep.ipc.common import registry
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import decode_args


def main(raw: bytes) -> None:
    """Entry point of the process."""
    args = decode_args(raw, CoreArgs)
    executor: Executor = registry.load(registry.EXECUTORS["multiproc"])(args.config, args.replica)
    executor.launch()
    # What the core itself needs is imported while they import torch.
    from sidestep.engine_core import proc

    proc.main(args, executor)
