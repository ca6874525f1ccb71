"""Whether processes compute, by the CPU time that they use."""

from __future__ import annotations

import os
from collections.abc import Sequence

LEAST_S = 0.02
"""Seconds of CPU time that count as computing: two ticks of the clock by which Linux tells them.

A process that hangs uses less in any limit for stalls, whatever its idle threads do.
"""
_HALTED = (b"T", b"t", b"Z", b"X")
"""States of a process that is stopped, traced or gone, in /proc."""


class CpuUse:
    """Looks at the CPU time of processes that wait for each other, such as a replica's ranks."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Begin with their times of now."""
        self._pids = tuple(pids)
        self._seconds = self._look(())

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
        seconds = self._look(_HALTED)
        if seconds is None or self._seconds is None or seconds - self._seconds < LEAST_S:
            return False
        self._seconds = seconds
        return True

    def _look(self, excluded: Sequence[bytes]) -> float | None:
        """Return their seconds; None if one is in an excluded state, or not known."""
        total = 0
        for pid in self._pids:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                return None
            if fields[0] in excluded:
                return None
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")
