"""What a test process starts with, whatever it was started by: Ctrl-C works and there is a standard input."""

from __future__ import annotations

import os
import signal


def take_interrupts() -> None:
    """Make SIGINT raise KeyboardInterrupt here, and end the processes that are started from here.

    nohup and background shells start their programs with SIGINT ignored, and children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def open_standard_input() -> None:
    """Put the null device in the place of a standard input that is closed.

    Without it the next file that anybody opens would be everybody's standard input.
    """
    try:
        os.fstat(0)
    except OSError:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        if descriptor:
            os.dup2(descriptor, 0)
            os.close(descriptor)
