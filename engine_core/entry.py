"""The entry point of the core's process, which starts its workers first: they need longest."""

from __future__ import annotations

import time

from sidestep.engine_core.start_again import obstacle_to
from sidestep.executor.base import Executor
from sidestep.ipc.common import registry
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import decode_args


def main(raw: bytes) -> None:
    """Launch the workers, then run the core. This is the entry point of the process."""
    args = decode_args(raw, CoreArgs)
    number = 0
    after: tuple[int, ...] = ()
    if args.again is not None:
        number, after = args.again.number, args.again.pids
        time.sleep(args.again.delay_s)
    executor: Executor = registry.load(registry.EXECUTORS["multiproc"])(
        args.config, args.replica, number, args.rank_hosts, after
    )
    # Ranks of this host alone wait for the end of the old processes by themselves.
    is_local = not args.rank_hosts
    obstacle = None if is_local else obstacle_to(args.again, executor)
    if obstacle is None:
        executor.launch()
    # The core's own modules are imported while the workers import torch.
    from sidestep.engine_core import proc

    if is_local:
        obstacle = obstacle_to(args.again, executor)
    proc.main(args, executor, obstacle)
