"""Whether processes compute, by the CPU time that they use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

LEAST_S = 0.02
"""Seconds of CPU time that count as computing: two ticks of the clock by which Linux tells them.

A process that hangs uses less in any limit for stalls, whatever its idle threads do.
"""
_HALTED = (b"T", b"t", b"Z", b"X")
"""States of a process that is stopped, traced or gone, in /proc."""


class CpuTime(NamedTuple):
    """The CPU time that some processes have used."""

    seconds: float
    is_halted: bool
    """Whether one of them is stopped: the others may wait for it with all their might."""


def cpu_time(pids: Iterable[int]) -> CpuTime | None:
    """Return the CPU time of processes of this host; None if one is gone, or without /proc."""
    ticks, is_halted = 0, False
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        is_halted |= fields[0] in _HALTED
        ticks += int(fields[11]) + int(fields[12])
    return CpuTime(ticks / os.sysconf("SC_CLK_TCK"), is_halted)


class CpuUse:
    """Looks at the CPU time of processes that wait for each other, such as a replica's ranks."""

    def __init__(
        self, pids: Sequence[int], elsewhere: Sequence[Callable[[], CpuTime | None]] = ()
    ) -> None:
        """Begin with their times of now.

        elsewhere: each returns the time of processes on another host, as far as it is known.
        """
        self._pids = tuple(pids)
        self._elsewhere = elsewhere
        time = self._look()
        self._seconds = None if time is None else time.seconds

    def __repr__(self) -> str:
        return f"CpuUse({self._pids}, {self._seconds} s)"

    @property
    def is_known(self) -> bool:
        """Whether the system tells these times: there is /proc."""
        return self._seconds is not None

    def has_grown(self) -> bool:
        """Return whether they have computed since this was true last.

        False if one of them is stopped or gone: the others may wait for it with all their might.
        """
        time = self._look()
        if time is None or time.is_halted or self._seconds is None:
            return False
        if time.seconds - self._seconds < LEAST_S:
            return False
        self._seconds = time.seconds
        return True

    def _look(self) -> CpuTime | None:
        """Return the time of all of them; None if one is gone, or its time is not known."""
        seconds, is_halted = 0.0, False
        for time in (cpu_time(self._pids), *(look() for look in self._elsewhere)):
            if time is None:
                return None
            seconds, is_halted = seconds + time.seconds, is_halted or time.is_halted
        return CpuTime(seconds, is_halted)
