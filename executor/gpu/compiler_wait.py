"""Wait for the process that compiles kernels ahead (executor/processes/kernel_compiler.py).

The runner imports this file, and the compiling process imports the runner. The wait has a file of
its own so that the two imports form no circle.
"""

from __future__ import annotations

import os
import select

_TIMEOUT_S = 300.0
"""Seconds that a worker waits at most before it compiles the kernels itself."""


def wait_for_compiler(compiled: int | None) -> None:
    """Wait until the process has ended. compiled: see WorkerArgs."""
    if compiled is not None:
        select.select([compiled], [], [], _TIMEOUT_S)
        os.close(compiled)
