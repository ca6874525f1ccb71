"""How long requests have waited, by what they waited for.

The sum over all requests is kept, not each one's part: the queue's length times the time that has
passed, of which one is the first's and the rest the others'. So a step costs the same whatever the
queue's length.
"""

from __future__ import annotations

from sidestep.ipc.transport.records import WAIT_REASONS, WaitReason


class QueueWait:
    """Told of each change of the queue, just before it."""

    def __init__(self) -> None:
        self.reason: WaitReason = "max_num_batched_tokens"
        """What the first in the queue waits for; for one that has just come it is the next step."""
        self._seconds = dict.fromkeys(WAIT_REASONS, 0.0)
        self._since = 0.0

    def elapse(self, now: float, num_waiting: int) -> None:
        """So many have waited since the last call. Seconds of the scheduler's clock."""
        if num_waiting:
            passed = now - self._since
            self._seconds[self.reason] += passed
            self._seconds["turn"] += passed * (num_waiting - 1)
        else:
            self.reason = "max_num_batched_tokens"
        self._since = now

    def waited(self, reason: WaitReason, seconds: float) -> None:
        """One has waited outside of the queue."""
        self._seconds[reason] += seconds

    def stats(self) -> dict[str, float]:
        """Seconds by reason, until the queue's last change or step."""
        return {f"queue_wait_{reason}_s": seconds for reason, seconds in self._seconds.items()}
