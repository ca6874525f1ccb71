"""Where the state of each slot lies, if rows may verify drafts.

A state then has a row of memory for each token that a step may accept: its first row is the state
after the last token that is no draft, the next one that after the first draft, and so on. The next
step begins from the row of the last accepted draft. All stages of a pipeline know which it is, from
the number of tokens that the slot has computed.
"""

from __future__ import annotations

import numpy as np

from sidestep.executor.recurrent.state_columns import StateColumns
from sidestep.executor.runner.input_batch import HostBatch


class StatePlaces:
    """The rows of memory of each slot's state."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        """Begin without requests. num_drafts: most drafts of a row."""
        self.width = 1 + num_drafts
        """Rows of memory of a state; those of state s begin at s * width."""
        self._settled = np.zeros(num_slots, np.int32)
        """[slots] Tokens of the request up to the first draft of its last row."""
        self._entries = np.zeros(num_slots, np.int64)
        """[slots] The stay in the slot (HostBatch.entries) that `_settled` belongs to."""

    def columns(self, batch: HostBatch) -> StateColumns:
        """Return the columns of a step's rows, and note where their states lie behind it."""
        slots, first = batch.slots, batch.seq_lens - batch.num_tokens
        drafts = np.zeros_like(slots) if batch.num_drafts is None else batch.num_drafts
        own = batch.state.records["state"][slots] * np.int32(self.width)
        goes_on = self._entries[slots] == batch.entries
        accepted = np.where(goes_on, first - self._settled[slots], 0)
        assert ((accepted >= 0) & (accepted < self.width)).all(), "a state that no row has made"
        self._entries[slots], self._settled[slots] = batch.entries, batch.seq_lens - drafts
        return StateColumns(
            batch.query_starts,
            np.where(first == 0, np.int32(-1), own + accepted),
            own + drafts,
            *self._saves(batch, own, drafts),
        )

    def _saves(
        self, batch: HostBatch, own: np.ndarray, drafts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return starts, offsets and rows of the saves: of checkpoints, and before each draft."""
        saves, count = batch.saves, len(batch.slots)
        of_drafts = np.repeat(np.arange(count), drafts)
        within = np.arange(len(of_drafts)) - np.repeat(np.cumsum(drafts) - drafts, drafts)
        row = np.concatenate([np.repeat(np.arange(count), np.diff(saves.starts)), of_drafts])
        offsets = np.concatenate([saves.offsets, (batch.num_tokens - drafts)[of_drafts] + within])
        targets = np.concatenate([saves.targets * self.width, own[of_drafts] + within])
        order = np.lexsort((offsets, row))
        starts = np.searchsorted(row[order], np.arange(count + 1))
        return starts, offsets[order].astype(np.int32), targets[order].astype(np.int32)
