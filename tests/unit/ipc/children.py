"""Functions that tests run in child processes."""

import logging
import os
import sys
import threading
import time
import warnings

from sidestep.ipc.processes.process import decode_args, spawn
from sidestep.ipc.transport.shm_ring import RingSpec, RingWriter


def write_one_message(raw: bytes) -> None:
    RingWriter(decode_args(raw, RingSpec)).send([b"hello"])


def exit_with_status(raw: bytes) -> None:
    sys.exit(decode_args(raw, int))


def wait_for_ever(raw: bytes) -> None:
    threading.Event().wait()


def write_pid_of_grandchild(raw: bytes) -> None:
    """Start a child, write both pids to the given file, and wait."""
    child = spawn("grandchild", "tests.unit.ipc.children:wait_for_ever", None)
    path = decode_args(raw, str)
    with open(path + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(path + ".part", path)
    threading.Event().wait()


def hold_the_interpreter(raw: bytes) -> None:
    """Run Python code for ever, so that only the lifeline's thread can end the process."""
    while True:
        time.perf_counter()


def log_and_fail(_: bytes) -> None:
    """Write a log record, a warning and an uncaught exception."""
    logging.getLogger("sidestep.child").info("about to fail")
    warnings.warn("soon", FutureWarning, stacklevel=1)
    raise RuntimeError("no more")
