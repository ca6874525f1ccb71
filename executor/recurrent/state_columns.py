"""Columns on the host for recurrent layers: the rows of a step, and the states that they use.

The host knows all of it: where it computes, and on a GPU because drafts are refused there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sidestep.executor.runner.input_batch import HostBatch
from sidestep.ipc.transport.step import Int32, Int64


class StateColumns(NamedTuple):
    """The columns of StateRows, on the host; R rows and S saves."""

    query_starts: Int64
    state_in: Int32
    state_out: Int32
    save_starts: Int64
    save_offsets: Int32
    save_rows: Int32

    @classmethod
    def of(cls, batch: HostBatch) -> StateColumns:
        """Return the columns of a step."""
        own = batch.state.records["state"][batch.slots]
        is_first = batch.seq_lens == batch.num_tokens
        begins = np.where(is_first, np.int32(-1), own)
        return cls(batch.query_starts, begins, own, *batch.saves)
