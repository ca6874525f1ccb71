"""How long requests have waited, by reason.

Only the sum over all requests is kept: the queue's length times the time that has passed. The first
request waits for the present reason, the others for their turn. So a step costs the same whatever
the queue's length.
"""

from __future__ import annotations

from sidestep.ipc.transport.records import WAIT_REASONS, WaitReason


class QueueWait:
    """The seconds that requests have waited, by reason. Call it before the queue changes."""

    def __init__(self) -> None:
        self.reason: WaitReason = "max_num_batched_tokens"
        """Reason why the first in the queue waits; a new request waits for a step."""
        self._seconds = dict.fromkeys(WAIT_REASONS, 0.0)
        self._since = 0.0

    def elapse(self, now: float, num_waiting: int) -> None:
        """Count that `num_waiting` requests have waited since the last call.

        now: seconds of the scheduler's clock.
        """
        if num_waiting:
            passed = now - self._since
            self._seconds[self.reason] += passed
            self._seconds["turn"] += passed * (num_waiting - 1)
        else:
            self.reason = "max_num_batched_tokens"
        self._since = now

    def waited(self, reason: WaitReason, seconds: float) -> None:
        """Add the seconds that one request has waited outside of the queue."""
        self._seconds[reason] += seconds

    def stats(self) -> dict[str, float]:
        """Return seconds by reason, until the queue's last change or step."""
        return {f"queue_wait_{reason}_s": seconds for reason, seconds in self._seconds.items()}
