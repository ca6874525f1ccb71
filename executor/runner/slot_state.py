"""The values of each slot that a step's output changes, where the host computes.

They are one table, so that the last stage of a pipeline can send the rows that it has changed to
the stages before it. On a GPU the same table lies on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from sidestep.ipc.transport.step import Int32

NUM_COMPUTED, LAST_SAMPLED, NUM_DRAFTS, DRAFTS = range(4)
"""Columns of the table; the drafts of a slot begin at the last one."""


class SlotState:
    """The table, in memory that numpy and torch share."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self.table = torch.zeros(num_slots, DRAFTS + max_drafts, dtype=torch.int32)
        self._rows: Int32 = self.table.numpy()
        self.num_computed = self._rows[:, NUM_COMPUTED]
        """[slots] Tokens in the cache of a request that decodes."""
        self.last_sampled = self._rows[:, LAST_SAMPLED]
        self.num_drafts = self._rows[:, NUM_DRAFTS]
        self.drafts = self._rows[:, DRAFTS:]
        """[slots, most drafts]"""

    def enter(self, slots: Int32) -> None:
        """Forget the drafts of requests that had these slots."""
        self.num_drafts[slots] = 0

    def input_ids(self, slots: Int32, offsets: Int32) -> Int32:
        """Return the inputs of a row: its last sampled token at offset 0, then its drafts."""
        ids: Int32 = self._rows[slots, np.where(offsets == 0, LAST_SAMPLED, DRAFTS - 1 + offsets)]
        return ids

    def set_drafts(self, slot: int, drafts: Int32) -> None:
        """Keep a slot's drafts for the next step."""
        self.num_drafts[slot] = len(drafts)
        self.drafts[slot, : len(drafts)] = drafts
