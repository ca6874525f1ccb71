"""Presence, frequency and repetition penalties: logits lowered for tokens that occurred before."""

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

_PROMPT = 1 << 30
"""Bit of a count that says that the prompt has the token."""
_FIRST_ROWS = 8
"""Rows of the table when it is first made."""


class Penalties(LogitsProcessor):
    """Counts each token of the requests that ask for penalties, in a table.

    Only those requests get a row. The table grows by half or more when it is full. Sampled tokens
    are counted on the device, so no earlier token is missed with steps in flight.
    """

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        # One row a request: how often each token is in the output, plus _PROMPT if the prompt has
        # the token.
        self._counts = torch.zeros(0, setup.vocab_size, dtype=torch.int32, device=setup.device)
        self._free: list[int] = []
        self._row_of: dict[int, int] = {}
        self._rows = torch.zeros(setup.num_slots, dtype=torch.int64, device=setup.device)
        """The table's row of each slot, on the device."""
        self._penalties = torch.zeros(3, setup.num_slots, device=setup.device)
        """Presence, frequency and repetition penalty, by slot."""

    def enter(self, request: EnteringRequest) -> bool:
        """Give a request with penalties a row, and count its tokens."""
        controls = request.controls
        penalties = (
            controls.presence_penalty,
            controls.frequency_penalty,
            controls.repetition_penalty,
        )
        if penalties == (0, 0, 1):
            return False
        if not self._free:
            self._grow()
        row = self._row_of[request.slot] = self._free.pop()
        self._rows[request.slot] = row
        self._penalties[:, request.slot] = to_device(
            np.array(penalties, np.float32), self.setup.device
        )
        self._counts[row] = 0
        outputs, numbers = np.unique(request.output_token_ids, return_counts=True)
        self._add(row, np.unique(request.prompt_token_ids), np.array([_PROMPT]))
        self._add(row, outputs, numbers)
        return True

    def leave(self, slot: int) -> None:
        """Free the slot's row."""
        self._free.append(self._row_of.pop(slot))

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Apply the penalties."""
        counts = self._counts.index_select(0, self._rows.index_select(0, slots.on_device))
        presence, frequency, repetition = self._penalties.index_select(1, slots.on_device)[
            :, :, None
        ]
        factor = torch.where(counts > 0, repetition, 1.0)
        logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
        outputs = counts.bitwise_and_(_PROMPT - 1)
        logits -= outputs * frequency
        logits -= (outputs > 0) * presence

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:
        """Count the sampled tokens."""
        # Each row occurs once: nothing is added twice to one count.
        self._counts.index_put_(
            (self._rows.index_select(0, slots.on_device), token_ids.clamp(min=0)),
            (token_ids >= 0).int(),
            accumulate=True,
        )

    def _add(
        self,
        row: int,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        """Add numbers to the counts of a row. tokens: each of them once."""
        if not len(tokens):
            return
        device = self.setup.device
        self._counts[row].index_add_(
            0,
            to_device(tokens.astype(np.int64), device),
            to_device(np.broadcast_to(numbers, tokens.shape).astype(np.int32), device),
        )

    def _grow(self) -> None:
        old = self._counts.shape[0]
        size = min(self.setup.num_slots, max(_FIRST_ROWS, old + old // 2))
        counts = self._counts.new_zeros(size, self.setup.vocab_size)
        counts[:old] = self._counts
        self._counts = counts
        self._free = list(range(old, size))
