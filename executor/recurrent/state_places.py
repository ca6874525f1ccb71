"""Where the state of each slot lies, if rows may verify drafts and the host computes.

All stages of a pipeline know which drafts were accepted, from the number of tokens that the slot
has computed. executor/recurrent/device_places.py does the same for a GPU.
"""

from __future__ import annotations

import numpy as np

from sidestep.executor.recurrent.state_columns import StateColumns
from sidestep.executor.runner.input_batch import HostBatch


class StatePlaces:
    """The rows of memory of each slot's state."""

    def __init__(self, num_slots: int, width: int) -> None:
        """Begin without requests. width: rows of memory of a state; those of s begin at s * width.

        It is one more than the most drafts of a row.
        """
        self._width = width
        self._settled = np.zeros(num_slots, np.int32)
        """[slots] Tokens of the request up to the first draft of its last row."""
        self._entries = np.zeros(num_slots, np.int64)
        """[slots] The stay in the slot (HostBatch.entries) that `_settled` belongs to."""

    def columns(self, batch: HostBatch) -> StateColumns:
        """Return the columns of a step's rows, and note where their states lie behind it."""
        columns = StateColumns.of(batch, self._width)
        slots, start = batch.slots, batch.seq_lens - batch.num_tokens
        goes_on = self._entries[slots] == batch.entries
        accepted = np.where(goes_on, start - self._settled[slots], 0)
        assert ((accepted >= 0) & (accepted < self._width)).all(), "a state that no row has made"
        self._entries[slots], self._settled[slots] = batch.entries, start + columns.settled
        return columns._replace(
            state_in=np.where(start == 0, np.int32(-1), columns.state_out + accepted)
        )
