"""The progress of the workers, and the time after which they count as hung.

Progress is the output of a step. On a CPU it is also CPU time that the workers use: a long prompt
of a large model takes minutes there, and must not end a healthy machine. A GPU's workers may spin
while they wait for a kernel that never ends, so their CPU time says nothing. There the limit grows
with the longest steps instead.

Only time in which the core itself ran counts. Each look at the workers adds the time since the last
look, and never more than two intervals. So a machine that slept, and a core that was stopped, find
the silence as long as it was before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.processes.cpu_use import CpuUse

STEPS = 20
"""Length of the limit, in steps as long as the longest of the last minute."""
_REMEMBERED_S = 60.0
_LOOKS = 10
"""Looks at the workers in the shortest limit."""
_INTERVAL_S = 1.0
"""Seconds between two looks at the workers' CPU time where no limit is set."""


class WorkersStalledError(EngineDeadError):
    """The workers hang, and have been killed."""


class Progress:
    """Counts the time in which steps are in flight and nothing comes back."""

    def __init__(
        self, limit_s: float, clock: Callable[[], float], cpu_use: CpuUse | None = None
    ) -> None:
        """Begin with nothing in flight.

        limit_s: shortest limit; 0 for none. cpu_use: the CPU time of workers that compute on a CPU,
        None for workers on another device.
        """
        self._limit_s = limit_s
        self._clock = clock
        self._cpu_use = cpu_use
        self._interval_s = limit_s / _LOOKS if limit_s else _INTERVAL_S
        self._most_s = 2 * self._interval_s if limit_s else math.inf
        """Most seconds that one look adds."""
        self._last_look = self._begin = clock()
        self._next_cpu_look: float | None = None
        """None until the workers' CPU time has been read in this silence."""
        self._step_s = 0.0
        """Seconds since the last output."""
        self.silent_s = 0.0
        """Seconds since the last progress."""
        self._longest: deque[tuple[int, float]] = deque()
        """By the seconds of the clock in which steps came back: the longest of these steps."""

    def __repr__(self) -> str:
        return f"Progress(silent_s={self.silent_s:.3f}, limit_s={self.limit_s:g})"

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the workers count as hung; 0 for no limit."""
        if not self._limit_s:
            return 0.0
        oldest = self._begin - _REMEMBERED_S
        longest = max((length for at, length in self._longest if at >= oldest), default=0.0)
        return max(self._limit_s, STEPS * longest)

    @property
    def next_look(self) -> float | None:
        """The latest time of the next look, while steps are in flight; None for no look."""
        if not self._limit_s:
            return None
        left = self._limit_s - self.silent_s
        return self._last_look + (min(left, self._interval_s) if left > 0 else self._interval_s)

    def began(self) -> None:
        """Note that a step is in flight after none was."""
        self._last_look = self._clock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._begin = self._last_look
        self._step_s = self.silent_s = 0.0
        self._next_cpu_look = None

    def output_taken(self) -> None:
        """Note that the oldest step is back."""
        self.look(counts=True)
        second = int(self._last_look)
        if not self._longest or self._longest[-1][0] != second:
            self._longest.append((second, self._step_s))
            while self._longest[0][0] < second - _REMEMBERED_S:
                self._longest.popleft()
        elif self._step_s > self._longest[-1][1]:
            self._longest[-1] = (second, self._step_s)
        self._begin_anew()

    def look(self, *, counts: bool) -> None:
        """Add the time since the last look.

        counts: whether the workers had nothing but steps to do in that time.
        """
        now = self._clock()
        passed, self._last_look = min(now - self._last_look, self._most_s), now
        if not counts:
            self._begin_anew()
            return
        self._step_s += passed
        self.silent_s += passed
        if self._cpu_use is not None and self.silent_s >= self._interval_s:
            self._look_at_cpu(self._cpu_use, now)

    def _look_at_cpu(self, cpu_use: CpuUse, now: float) -> None:
        """Count CPU time that the workers have used in this silence as progress."""
        if self._next_cpu_look is None or now >= self._next_cpu_look:
            is_first, self._next_cpu_look = self._next_cpu_look is None, now + self._interval_s
            if cpu_use.has_grown() and not is_first:
                self.silent_s = 0.0

    @property
    def problem(self) -> str | None:
        """Why the workers count as hung; None if they do not."""
        limit_s = self._limit_s
        if not limit_s or self.silent_s < limit_s or self.silent_s < (limit_s := self.limit_s):
            return None
        if self._cpu_use is not None and not self._cpu_use.is_known:
            return None  # nobody can tell whether they compute
        return f"the steps in flight made no progress for {limit_s:g} s"
