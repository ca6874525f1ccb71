"""The entry point of the core's process, which starts its workers first: they need longest."""

from __future__ import annotations

from sidestep.executor.base import Executor
from sidestep.ipc.common import registry
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import decode_args


def main(raw: bytes) -> None:
    """Launch the workers, then run the core. This is the entry point of the process."""
    args = decode_args(raw, CoreArgs)
    executor: Executor = registry.load(registry.EXECUTORS["multiproc"])(args.config, args.replica)
    executor.launch()
    # The core's own modules are imported while the workers import torch.
    from sidestep.engine_core import proc

    proc.main(args, executor)
