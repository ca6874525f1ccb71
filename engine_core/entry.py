"""The entry point of the core's process, which starts its workers first: they need longest."""

from __future__ import annotations

from sidestep.engine_core.start_again import wait_until_free
from sidestep.executor.base import Executor
from sidestep.ipc.common import registry
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import decode_args
from sidestep.ipc.transport.messages import Dead


def main(raw: bytes) -> None:
    """Launch the workers, then run the core. This is the entry point of the process."""
    args = decode_args(raw, CoreArgs)
    executor: Executor = registry.load(registry.EXECUTORS["multiproc"])(
        args.config,
        args.replica,
        0 if args.again is None else args.again.number,
        args.rank_hosts,
    )
    obstacle = _obstacle(args, executor)
    if obstacle is None:
        executor.launch()
    # The core's own modules are imported while the workers import torch.
    from sidestep.engine_core import proc

    proc.main(args, executor, obstacle)


def _obstacle(args: CoreArgs, executor: Executor) -> Dead | None:
    """Return why a replica that has died cannot be started again; None if it can."""
    if args.again is None:
        return None
    if (cause := wait_until_free(args.again)) is not None:
        return Dead(cause=cause, origin="core")
    if (cause := executor.what_devices_need()) is not None:
        return Dead(cause=cause, is_final=True)
    return None
