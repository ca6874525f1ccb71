"""Soft resets: a step failed, the worker lives, and its requests run again.

The worker forgets all requests and keeps its weights, cache and graphs. The core takes back the
steps in flight (engine_core/scheduling/take_back.py), and the requests go on as after a preemption.
"""

from __future__ import annotations

import logging

from sidestep.executor.base import StepFailed
from sidestep.ipc.common.errors import EngineDeadError

logger = logging.getLogger(__name__)
_GOOD_STEPS = 100
"""Steps without a failure between two soft resets that name no row; with fewer the replica ends."""


class SoftResets:
    """Counts the failures of steps, and says when a reset does not help."""

    def __init__(self) -> None:
        self._counts = {"oom": 0, "exception": 0}
        self._first_step: int | None = None
        """Number of the first step after the last reset that named no row; None before that."""

    def __repr__(self) -> str:
        return f"SoftResets({self._counts})"

    def count(self, failed: StepFailed, next_step: int) -> None:
        """Count a failure. next_step: number of the first step after the reset.

        Raises EngineDeadError where too few steps were good since the last reset. A row that is
        named does not come again, so its failure says nothing of the next steps.
        """
        if failed.slot < 0:
            if self._first_step is not None and failed.step_id - self._first_step < _GOOD_STEPS:
                raise EngineDeadError(failed.text)
            self._first_step = next_step
        self._counts[failed.cause] += 1
        logger.warning(
            "step %d failed (%s); the requests run again: %s",
            failed.step_id,
            failed.cause,
            failed.text,
        )

    def stats(self) -> dict[str, float]:
        """Return the number of resets by cause."""
        return {f"soft_resets_{cause}": float(count) for cause, count in self._counts.items()}
