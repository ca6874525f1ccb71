"""A job that computes the grammar masks of some requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidestep.ipc.transport.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_CHUNK = 16
"""Masks for each thread of the library, between two looks at the time."""
_PRECISE_S = 0.2e-3
"""Seconds. The thread's clock is read for masks that took longer; reading takes a microsecond."""
FOREVER = float("inf")
"""Seconds that a step may wait for its masks if no mask may be late."""


@dataclass(slots=True, eq=False)
class MaskJob:
    """Masks of some requests. It has all requests of a grammar that it has one of."""

    matchers: list[tuple[LLMatcher, int]]
    """Matchers with their rows in `masks`; nothing else may touch them until the job is done."""
    masks: Int32
    """[n, ceil(vocab_size / 32)] A bit a token, the lowest first."""
    num_left: int
    """Masks that have not been taken yet."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a processor for each mask that has been computed, in the order of `matchers`."""
    is_done: bool = False
    error: BaseException | None = None
    """Exception of the library; None if it raised none."""

    def end(self, error: BaseException | None = None) -> None:
        """Note that nobody computes it any more. error: what the library has raised."""
        self.error, self.is_done = error, True

    def mask_taken(self) -> bool:
        """Note that one of its masks has been taken; return whether all have."""
        self.num_left -= 1
        return not self.num_left

    def run(self, executor: LLExecutor | None, num_threads: int, until: float = FOREVER) -> None:
        """Compute the masks until `until`, a time of the monotonic clock.

        executor: shares the work among `num_threads` threads of its own.
        """
        if executor is not None:
            self._run_shared(executor, num_threads, until)
            return
        start, size = self.masks.ctypes.data, self.masks.shape[1] * 4
        begin, worked = time.monotonic(), time.thread_time()
        for i, (matcher, row) in enumerate(self.matchers):
            if i and begin >= until:
                return
            matcher.unsafe_compute_mask_ptr(start + row * size, size)
            end = time.monotonic()
            took, begin = end - begin, end
            if took > _PRECISE_S:  # the thread may have been suspended for a part of it
                now = time.thread_time()
                took, worked = min(took, now - worked), now
            self.seconds.append(took)

    def _run_shared(self, executor: LLExecutor, num_threads: int, until: float) -> None:
        start, size, chunk = self.masks.ctypes.data, self.masks.shape[1] * 4, _CHUNK * num_threads
        for first in range(0, len(self.matchers), chunk):
            begin = time.monotonic()
            if first and begin >= until:
                return
            part = self.matchers[first : first + chunk]
            executor.unsafe_compute_mask_ptr(part, start, size, len(self.masks))
            # The time of each mask is not known, nor the time in which its thread was suspended.
            each = (time.monotonic() - begin) * min(num_threads, len(part)) / len(part)
            self.seconds += [each] * len(part)
