"""The order of a step, which is the same on every device.

A device implements the parts of a step. A part leaves what later parts need in the work, an object
of the device's own for each step.

No torch here: the fake runner must start without it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Generic, TypeVar

from sidestep.executor.runner.runner import PendingOutput, Runner
from sidestep.ipc.transport.step import Int32, StepInput, StepMasks

Work = TypeVar("Work")


class StepOrder(Runner, Generic[Work]):
    """A runner whose steps are `Work`."""

    samples: bool
    """Whether the rank samples, and so needs the masks of steps."""

    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        """Launch a step, and return its output to be waited for."""
        # 1. The differences: requests and blocks by slot, then the content of copied blocks, which
        #    steps before this one have written.
        self.place = 0
        work = self._enter(step)
        if len(step.copy_sources):
            self._copy_blocks(step.copy_sources, step.copy_targets)
        if len(step.state_copy_sources):
            self._copy_states(step.state_copy_sources, step.state_copy_targets)
        # 2. This rank's layers, and the tokens of rows that wait for nothing.
        self.place = None
        self._receive(work)
        self._compute(work)
        # 3. The tokens of all other rows. A device that computes by itself is at work while the
        #    masks are made.
        self.place = 1
        if self.samples:
            if step.awaits_masks:
                assert receive_masks is not None, "nobody gives the masks"
                self._take_masks(work, receive_masks())
            self._sample_rest(work)
        # 4. The end of the step, and then what other stages wait for.
        pending = self._end(work)
        self.place = None
        self._send(work)
        return pending

    @abc.abstractmethod
    def _enter(self, step: StepInput) -> Work:
        """Apply a step's differences to the tables, and lay the step out."""

    @abc.abstractmethod
    def _copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copy blocks of the KV cache."""

    @abc.abstractmethod
    def _copy_states(self, sources: Int32, targets: Int32) -> None:
        """Copy states of recurrent layers."""

    @abc.abstractmethod
    def _receive(self, work: Work) -> None:
        """Receive what the layers of this stage need of other stages."""

    @abc.abstractmethod
    def _compute(self, work: Work) -> None:
        """Compute the layers of this stage."""

    @abc.abstractmethod
    def _take_masks(self, work: Work, masks: StepMasks) -> None:
        """Store the masks of the step, and the tokens that grammars force."""

    @abc.abstractmethod
    def _sample_rest(self, work: Work) -> None:
        """Sample the rows that `_compute` has left, accept drafts, and make the next ones."""

    @abc.abstractmethod
    def _end(self, work: Work) -> PendingOutput:
        """Mark the end of the step, and return its output to be waited for."""

    @abc.abstractmethod
    def _send(self, work: Work) -> None:
        """Send the stream to the stage after, and the slots' progress to the stages before."""
