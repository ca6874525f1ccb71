"""The wait of a core that takes the place of one that has died, until its workers can start."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sidestep.ipc.processes.core_args import StartAgain
from sidestep.ipc.processes.process import is_running

_END_S = 30.0
"""Seconds that the processes of the last start may need for their end."""
_LOOK_S = 0.02


def wait_until_free(again: StartAgain) -> str | None:
    """Wait for the pause to pass and the last start's processes to end.

    Return None, or the reason why nothing can start: a process that has not ended.
    """
    time.sleep(again.delay_s)
    until = time.monotonic() + _END_S
    while left := _running(again.pids):
        if time.monotonic() > until:
            return f"process {left[0]} of the replica that died has not ended for {_END_S:g} s"
        time.sleep(_LOOK_S)
    return None


def _running(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]
