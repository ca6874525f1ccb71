"""The initial state of a test process, however it was started.

Ctrl-C works, and there is a standard input.
"""

from __future__ import annotations

import os
import signal


def take_interrupts() -> None:
    """Make SIGINT raise KeyboardInterrupt in this process, and end the processes that it starts.

    nohup and background shells start their programs with SIGINT ignored, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def open_standard_input() -> None:
    """Open the null device as standard input if standard input is closed.

    Otherwise the next file that any code opens would become the standard input.
    """
    try:
        os.fstat(0)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        if descriptor:
            os.dup2(descriptor, 0)
            os.close(descriptor)
