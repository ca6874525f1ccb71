"""Masks of the tokens that rows with a grammar may sample.

The core sends the masks while the model computes.

Masks repeat, so they are kept in a table on the device, and a row names its mask's index there (see
ipc.transport.step.StepMasks). A row that asks for nothing else is sampled like a plain row, once
its logits have been masked in place. A row with other controls is a special row, for which the
grammar is the last of the processors.
"""

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
from sidestep.ipc.transport.step import Int32, StepInput, StepMasks
from sidestep.kernels.ops.token_masks import mask_tokens


class GrammarMasks(LogitsProcessor):
    """The processor of grammars. It comes last, so that no other brings back a forbidden token."""

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup, num_masks: int, max_drafts: int = 0) -> None:
        super().__init__(setup)
        words = -(-setup.vocab_size // 32)
        self._table = torch.zeros(num_masks, words, dtype=torch.int32, device=setup.device)
        self._marks = np.zeros((setup.num_slots, 1 + max_drafts), np.int32)
        """By slot, for its token and then its drafts: 1 + the index of the mask in the step that is
        to be sampled, 0 if there is none."""
        self.offset = 0
        """Number of drafts before the tokens whose logits `apply` masks."""

    def enter(self, request: EnteringRequest) -> bool:
        """Accept requests with a grammar."""
        return request.controls.has_grammar

    def take(self, step: StepInput, masks: StepMasks) -> None:
        """Take in the masks of the step that is to be sampled.

        New masks go to the device in one copy.
        """
        assert masks.step_id == step.step_id, (
            f"masks of step {masks.step_id} came for step {step.step_id}"
        )
        # The token of a row that gets no mask will be dropped: its request has ended, or will be
        # computed again.
        self._marks.fill(0)
        sizes = masks.sizes if len(masks.sizes) else np.ones(len(masks.rows), np.int32)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        offsets = np.arange(len(starts)) - starts
        self._marks[np.repeat(step.slots[masks.rows], sizes), offsets] = masks.mask_indices + 1
        if len(masks.words):
            num_words = self._table.shape[1]
            new = torch.empty(
                len(masks.words) // num_words,
                num_words,
                dtype=torch.int32,
                pin_memory=self.setup.device.type == "cuda",
            )
            new.numpy().reshape(-1)[:] = masks.words
            self._table[masks.first_new : masks.first_new + len(new)].copy_(new, non_blocking=True)

    def marks(self, slots: Int32, offsets: Int32 | int = 0) -> Int32:
        """Return the marks, which `mask` takes, of the requests in these slots.

        offsets: number of drafts before each of the tokens meant.
        """
        marks: Int32 = self._marks[slots, offsets]
        return marks

    def num_masked_drafts(self, slots: Int32) -> Int32:
        """Return how many drafts of each slot have a mask behind them."""
        return np.maximum((self._marks[slots] > 0).sum(1) - 1, 0).astype(np.int32)

    def mask(self, logits: Tensor, marks: Tensor) -> None:
        """Set the logits to minus infinity that each row may not sample.

        logits [R, V] of any type; marks int32 [R] on the device, where 0 leaves a row as it is.
        """
        mask_tokens(logits, marks, self._table)

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Mask the logits of special rows."""
        marks = self._marks[list(slots), self.offset]
        self.mask(logits, to_device(marks, self.setup.device))
