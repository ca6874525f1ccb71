"""The wait of a core that takes the place of one that has died, until its workers may go on.

Workers of this host alone are launched before that. They import their libraries while the old
processes end, and wait for this end before they use the device (executor/processes/worker.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.executor.base import Executor
from sidestep.ipc.processes.core_args import StartAgain
from sidestep.ipc.processes.process import wait_for_end

if TYPE_CHECKING:
    from sidestep.ipc.transport.messages import Dead

_END_S = 30.0
"""Seconds that the processes of the last start may need for their end."""


def obstacle_to(again: StartAgain | None, executor: Executor) -> Dead | None:
    """Wait until the last start's processes have ended; return why nothing can start, or None.

    again: None for a first start.
    """
    if again is None:
        return None
    # Not at the top: it imports numpy, and the core launches workers before that.
    from sidestep.ipc.transport.messages import Dead

    if (pid := wait_for_end(again.pids, _END_S)) is not None:
        cause = f"process {pid} of the replica that died has not ended for {_END_S:g} s"
        return Dead(cause=cause, origin="core")
    need = executor.what_devices_need()
    return None if need is None else Dead(cause=need, is_final=True)
