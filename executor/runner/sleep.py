"""Sleep: a rank frees the memory of its KV cache and its weights, and takes it again.

The device decides what is freed. The core sees to it that no request runs meanwhile, and that no
request expects cached prefixes afterwards.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Protocol

from sidestep.ipc.transport.worker_calls import CallResult, Sleep, WakeUp


class Memory(Protocol):
    """The memory of a rank that can be freed."""

    def free(self, level: int) -> int:
        """Free what a level frees, and return the bytes. Raises CallRefusedError."""

    def restore(self, level: int) -> None:
        """Restore what `free` has freed.

        Raises CallRefusedError, after which it can be tried again.
        """


class SleepCalls:
    """Answers the calls that free memory and restore it."""

    def __init__(self, memory: Memory, settle: Callable[[], None]) -> None:
        """Begin awake. settle: ends what is under way between ranks."""
        self._memory = memory
        self._settle = settle
        self._level = 0
        """The level of the sleep; 0 while the rank is awake."""

    def sleep(self, call: Sleep) -> CallResult:
        """Free memory, unless the rank sleeps already."""
        freed = 0
        if not self._level:
            self._settle()
            freed = self._memory.free(call.level)
            self._level = call.level
        return {"freed_bytes": freed}

    def wake_up(self, call: WakeUp) -> CallResult:
        """Restore what sleep has freed, if the rank sleeps."""
        if self._level:
            self._memory.restore(self._level)
            self._level = 0
        return {}


def return_freed_memory() -> None:
    """Give the process's freed memory back to the system.

    Workers let the C library keep it (executor/hosts/local_ranks.py).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
