"""A step's tokens laid out one request after the other, without padding: the host's view."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sidestep.executor.runner.host_tables import HostTables
from sidestep.ipc.transport.step import Int32, Int64, StepInput


class Saves(NamedTuple):
    """States of recurrent layers that rows of a step save, S of them, row by row."""

    starts: Int64
    """[R + 1] Index in S of each row's first."""
    offsets: Int32
    """[S] Tokens of the row behind which the state is saved; ascending in a row."""
    targets: Int32
    """[S] The states that they are saved in."""


_NO_SAVES = Saves(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))


def saves_of(step: StepInput) -> Saves:
    """Return the states that the rows of a step save, in the order of its rows."""
    row_of = {slot: row for row, slot in enumerate(step.slots.tolist())}
    rows = np.array([row_of[slot] for slot in step.saved_slots.tolist()], np.int64)
    order = np.lexsort((step.saved_counts, rows))
    starts = np.searchsorted(rows[order], np.arange(len(step.slots) + 1))
    return Saves(starts, step.saved_counts[order], step.saved_states[order])


@dataclass(frozen=True, kw_only=True)
class HostBatch:
    """A step as the host knows it: all but the ids of sampled tokens. R rows, T tokens.

    Values that only some devices need are made from the state's tables when they are first read. So
    they must be read before the next step is applied.
    """

    state: HostTables
    block_size: int
    slots: Int32
    """[R]"""
    num_tokens: Int32
    """[R]"""
    seq_lens: Int32
    """[R] Tokens in the cache after this step."""
    query_starts: Int64
    """[R + 1] Index in T of each row's first token; the last entry is T."""
    num_decode_rows: int
    """Leading rows of one token."""
    row_slots: Int32
    """[T] Slot of each token's row."""
    positions: Int64
    """[T]"""
    token_ids: Int32
    """[T] -1 where the id is on the device: `last_sampled` of the token's slot."""
    samples: npt.NDArray[np.bool_]
    """[R] Whether this step computes the last known token of a row, so that it samples."""
    num_drafts: Int32 | None = None
    """[R] Drafts among each row's tokens, its last ones; None if no row has any."""
    saves: Saves = _NO_SAVES
    """States of recurrent layers that rows save."""

    @property
    def total_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @cached_property
    def entries(self) -> Int64:
        """[R] A number for each stay of a request in a slot, never used again.

        State that is kept from step to step goes by this number, since one request after another
        takes a slot.
        """
        return self.state.entries[self.slots]

    @cached_property
    def block_tables(self) -> Int32:
        """[G, R, max_blocks] G cache groups."""
        return self.state.block_tables[:, self.slots]

    @cached_property
    def slot_mapping(self) -> Int64:
        """[G, T] Block id * block size + offset of each token in the cache, by cache group."""
        tables, indices = self.state.block_tables, self.positions // self.block_size
        blocks = tables[:, self.row_slots, indices].astype(np.int64)
        return blocks * self.block_size + self.positions % self.block_size

    @cached_property
    def unknown(self) -> Int64:
        """Indices into T of tokens whose id is on the device."""
        return np.flatnonzero(self.token_ids < 0)

    @cached_property
    def sampling_rows(self) -> Int64:
        """Indices of rows that sample."""
        return np.flatnonzero(self.samples)

    @cached_property
    def sampled_sizes(self) -> Int64:
        """For each row that samples, the number of its tokens that sample: one, and its drafts."""
        rows = self.sampling_rows
        ones = np.ones(len(rows), np.int64)
        return ones if self.num_drafts is None else ones + self.num_drafts[rows]

    @cached_property
    def logits_tokens(self) -> Int64:
        """Indices in T of the tokens that sample, row by row."""
        ends = self.query_starts[1:][self.sampling_rows]
        if self.num_drafts is None:
            return ends - 1
        sizes = self.sampled_sizes
        return np.repeat(ends - np.cumsum(sizes), sizes) + np.arange(sizes.sum())

    @cached_property
    def logits_rows(self) -> Int64:
        """Index in R of each token that samples."""
        rows = self.sampling_rows
        return rows if self.num_drafts is None else np.repeat(rows, self.sampled_sizes)

    @cached_property
    def logits_lens(self) -> Int32:
        """Tokens up to each token that samples: the position of the token that follows it."""
        if self.num_drafts is None:
            return self.seq_lens[self.sampling_rows]
        return (self.positions[self.logits_tokens] + 1).astype(np.int32)

    @cached_property
    def token_ranges(self) -> list[tuple[int, int]]:
        """Each row's tokens as a range of T."""
        ends = self.query_starts.tolist()
        return list(zip(ends, ends[1:], strict=False))


class Apart(NamedTuple):
    """Indices of rows that sample in a step, but apart from the others."""

    special: Int64
    """Special rows; see executor/sampling/special_rows.py."""
    masked: Int64
    """Rows that are sampled as plain rows are, when their masks have come."""

    @property
    def all(self) -> Int64:
        """All of these rows."""
        return np.concatenate(self)


def make_batch(
    state: HostTables, step: StepInput, block_size: int, num_drafts: Int32 | None = None
) -> HostBatch:
    """Lay a step out and advance the rows' counts. Its differences must have been applied.

    num_drafts: [R] drafts that each row has behind its token; None for none.
    """
    slots, counts = step.slots, step.num_tokens
    if num_drafts is not None:
        counts = counts + num_drafts
    first = state.num_computed[slots]
    seq_lens = first + counts
    starts = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    if total == len(slots):  # all rows have one token
        row_slots, positions, num_decode = slots, first.astype(np.int64), len(slots)
    else:
        row_slots = np.repeat(slots, counts)
        positions = np.arange(total) - np.repeat(starts[:-1] - first, counts)
        num_decode = int((counts > 1).argmax())
    known = positions < state.num_known[row_slots]
    token_ids = np.where(
        known, state.token_ids[row_slots, np.where(known, positions, 0)], np.int32(-1)
    )
    if len(step.forced_slots):
        token_ids[starts[:-1][np.isin(slots, step.forced_slots)]] = step.forced_tokens
    state.num_computed[slots] = seq_lens
    return HostBatch(
        state=state,
        block_size=block_size,
        slots=slots,
        num_tokens=counts,
        seq_lens=seq_lens,
        query_starts=starts,
        num_decode_rows=num_decode,
        row_slots=row_slots,
        positions=positions,
        token_ids=token_ids,
        samples=seq_lens >= state.num_known[slots],
        num_drafts=num_drafts,
        saves=saves_of(step) if state.has_states else _NO_SAVES,
    )
