"""A step's tokens laid out one request after the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sidestep.executor.request_state import RequestState
from sidestep.ipc.step import Int32, Int64, StepInput


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """What the host knows of a step: everything but the ids of tokens that were sampled. R rows, T tokens."""

    slots: Int32
    """[R]"""
    entries: Int64
    """[R] A number for each stay of a request in a slot, never used again: what is kept from step to step goes by it,
    since a slot is taken by one request after another."""
    num_tokens: Int32
    """[R]"""
    seq_lens: Int32
    """[R] Tokens in the cache after this step."""
    num_decode_rows: int
    """Leading rows of one token."""
    block_tables: Int32
    """[R, max_blocks]"""
    token_ids: Int64
    """[T] 0 where the id is on the device."""
    positions: Int64
    """[T]"""
    slot_mapping: Int64
    """[T] Block id * block size + offset of each token's place in the cache."""
    unknown: Int64
    """Indices into T of tokens whose id is `last_sampled` of their slot."""
    unknown_slots: Int64
    """Their slots."""
    sampling_rows: Int64
    """Rows that sample."""
    logits_tokens: Int64
    """For each of them, the index into T of its last token."""

    @cached_property
    def token_ranges(self) -> list[tuple[int, int]]:
        """Each row's tokens as a range of T."""
        ends = np.cumsum(self.num_tokens).tolist()
        return list(zip([0, *ends], ends, strict=False))


def make_batch(state: RequestState, step: StepInput, block_size: int) -> HostBatch:
    """Lays a step out and advances the rows' counts. The differences have been applied already."""
    slots, counts = step.slots, step.num_tokens
    first = state.num_computed[slots]
    seq_lens = first + counts
    ends = np.cumsum(counts)
    if int(ends[-1]) == len(slots):  # all rows have one token
        row_slots, positions, num_decode = slots, first.astype(np.int64), len(slots)
    else:
        row_slots = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        longer = counts > 1
        num_decode = int(longer.argmax())
    known = positions < state.num_known[row_slots]
    token_ids = np.where(known, state.token_ids[row_slots, np.where(known, positions, 0)], 0)
    slot_mapping = state.block_table[row_slots, positions // block_size].astype(np.int64) * block_size \
        + positions % block_size
    sampling_rows = np.flatnonzero(seq_lens >= state.num_known[slots])
    unknown = np.flatnonzero(~known)
    state.num_computed[slots] = seq_lens
    return HostBatch(
        slots=slots, entries=state.entries[slots], num_tokens=counts, seq_lens=seq_lens, num_decode_rows=num_decode,
        block_tables=state.block_table[slots], token_ids=token_ids.astype(np.int64), positions=positions,
        slot_mapping=slot_mapping, unknown=unknown, unknown_slots=row_slots[unknown].astype(np.int64),
        sampling_rows=sampling_rows, logits_tokens=(ends[sampling_rows] - 1).astype(np.int64))
