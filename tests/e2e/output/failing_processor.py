"""A logits processor that raises when a test wants it: an exception within a step on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)

TARGET = "tests.e2e.output.failing_processor:FailingProcessor"


class FailingProcessor(LogitsProcessor):
    """Changes no logits.

    A request asks for it by `extra_args={"FailingProcessor": {"in": PLACE, "at": N}}`. The call
    number N of the method PLACE raises; the calls of all requests count together.
    """

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._calls: dict[str, int] = {}
        self._plans: dict[str, tuple[int, bool]] = {}
        """By method: the call that raises, and whether memory is what it wants."""

    def enter(self, request: EnteringRequest) -> bool:
        """Take the plan of a request."""
        plan = request.controls.extra_args.get("FailingProcessor")
        if plan is None:
            return False
        if "in" in plan:
            self._plans.setdefault(plan["in"], (plan["at"], plan.get("oom", False)))
        self._called("enter")
        return True

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Change nothing."""
        self._called("apply")

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:
        """Learn nothing."""
        self._called("sampled")

    def _called(self, name: str) -> None:
        self._calls[name] = self._calls.get(name, -1) + 1
        at, wants_memory = self._plans.get(name, (-1, False))
        if self._calls[name] == at:
            if wants_memory:  # more than any machine can address
                torch.empty(1 << 50, dtype=torch.uint8, device=self.setup.device)
            raise ValueError(f"call {at} of {name} fails")
