"""Sleep: a rank frees the memory of its KV cache and its weights, and takes it again.

The device decides what is freed: see `_free` of the runners. The core sees to it that no request
runs meanwhile, and that no request expects cached prefixes afterwards.
"""

from __future__ import annotations

import abc
import ctypes
import os

from sidestep.executor.runner.runner import Runner
from sidestep.ipc.transport.worker_calls import CallResult, Sleep, WakeUp


class SleepingRunner(Runner):
    """A runner that can sleep."""

    _sleep_level = 0
    """The level of the sleep; 0 while the rank is awake."""

    @abc.abstractmethod
    def _free(self, level: int) -> int:
        """Free what a level frees, and return the bytes. Raises CallRefusedError."""

    @abc.abstractmethod
    def _restore(self, level: int) -> None:
        """Restore what `_free` has freed.

        Raises CallRefusedError, after which it can be tried again.
        """

    def sleep(self, call: Sleep) -> CallResult:
        """Free memory, unless the rank sleeps already."""
        freed = 0
        if not self._sleep_level:
            self.settle()
            freed = self._free(call.level)
            self._sleep_level = call.level
        return {"freed_bytes": freed}

    def wake_up(self, call: WakeUp) -> CallResult:
        """Restore what sleep has freed, if the rank sleeps."""
        if self._sleep_level:
            self._restore(self._sleep_level)
            self._sleep_level = 0
        return {}


def return_freed_memory() -> None:
    """Give the process's freed memory back to the system.

    Workers let the C library keep it (executor/processes/multiproc.py).
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
