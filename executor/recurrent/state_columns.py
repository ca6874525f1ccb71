"""Columns on the host for recurrent layers: the rows of a step, and the states that they use.

A state has a row of memory for each token that a step may accept: its first row is the state after
the last token that is no draft, the next one that after the first draft, and so on. The next step
begins from the row of the last accepted draft. The columns here are those of rows that begin from
the first row. Where the host computes, StatePlaces adds the accepted drafts. On a GPU only the
device knows them (kernels/recurrent/begin_states_triton.py).
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
    settled: Int32
    save_starts: Int64
    save_offsets: Int32
    save_rows: Int32

    @classmethod
    def of(cls, batch: HostBatch, width: int) -> StateColumns:
        """Return the columns of a step. width: rows of memory of a state."""
        first = batch.state.records["state"][batch.slots] * np.int32(width)
        is_new = batch.seq_lens == batch.num_tokens
        drafts = 0 if batch.num_drafts is None else batch.num_drafts
        starts, offsets, targets = batch.saves
        return cls(
            batch.query_starts,
            np.where(is_new, np.int32(-1), first),
            first,
            batch.num_tokens - drafts,
            starts,
            offsets,
            targets * np.int32(width),
        )
