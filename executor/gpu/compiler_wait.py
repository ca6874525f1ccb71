"""Wait until the process that compiles kernels ahead has ended (executor/gpu/kernel_compiler.py).

The runner imports this file, and the compiling process imports the runner: apart, they form no
circle.
"""

from __future__ import annotations

import os
import select

_TIMEOUT_S = 300.0
"""How long a worker waits at most before it compiles alone."""


def wait_for_compiler(compiled: int | None) -> None:
    """Returns when the process has ended. compiled: see WorkerArgs."""
    if compiled is not None:
        select.select([compiled], [], [], _TIMEOUT_S)
        os.close(compiled)
