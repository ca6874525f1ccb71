"""Logit bias: a number added to the logits of some tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)


class LogitBias(LogitsProcessor):
    """Keeps each request's tokens and numbers on the device."""

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, request: EnteringRequest) -> bool:
        """Copy the request's biases to the device."""
        bias = request.controls.logit_bias
        if not bias:
            return False
        device = self.setup.device
        self._biases[request.slot] = (
            to_device(np.fromiter(bias, np.int64, len(bias)), device),
            to_device(np.fromiter(bias.values(), np.float32, len(bias)), device),
        )
        return True

    def leave(self, slot: int) -> None:
        """Forget the biases of a slot."""
        del self._biases[slot]

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Add the biases."""
        of_rows = [self._biases[slot] for slot in slots]
        rows = np.repeat(np.arange(len(slots)), [len(tokens) for tokens, _ in of_rows])
        index = (to_device(rows, self.setup.device), torch.cat([tokens for tokens, _ in of_rows]))
        # Each (row, token) occurs once: a sum in any order is the same.
        logits.index_put_(index, torch.cat([values for _, values in of_rows]), accumulate=True)
