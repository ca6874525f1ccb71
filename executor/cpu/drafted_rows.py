"""Rows of several tokens on a device whose runner computes on the host.

A row that decodes computes its last sampled token and the drafts of its slot. Each of these tokens
is sampled as if it were alone, and a draft is accepted while it is what was sampled in its place
(verification by sampling). The host knows the outcome when the step is done, so the next step has
the rows' own lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.slot_state import SlotState
from sidestep.executor.speculation.proposer import Proposer, drafts_of_forced
from sidestep.ipc.transport.step import Int32, Int64, StepInput, StepOutput


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The tokens that a step's rows have given; S rows that sampled."""

    token_ids: Int32
    """The tokens, row by row."""
    num_accepted: Int64
    """[S] Drafts of each row that were accepted."""
    num_drafts: Int64
    """[S] Drafts of each row that were verified."""
    num_guesses: int
    """Rows that have a draft behind those that were verified, which were all accepted."""
    num_right: int
    """Rows among these whose last token is that draft."""


class DraftedRows:
    """The drafts of each slot, and the counts that follow from their acceptance."""

    def __init__(self, state: HostTables, slots: SlotState, proposer: Proposer | None) -> None:
        """Begin without requests.

        proposer: None without speculation, or on a stage that is not the last.
        """
        self._state = state
        self._slots = slots
        self._proposer = proposer

    def __repr__(self) -> str:
        return f"DraftedRows({self._proposer!r})"

    def enter(self, step: StepInput) -> None:
        """Take in a step's differences, which the host tables have, and what its rows continue."""
        self._slots.enter(step.entering["slot"])
        if self._proposer is not None:
            known = self._state.num_known
            for slot in step.entering["slot"].tolist():
                self._proposer.begin(slot, self._state.token_ids[slot, : known[slot]])
        slots = step.slots
        decoding = slots[self._state.num_computed[slots] >= self._state.num_known[slots]]
        self._state.num_computed[decoding] = self._slots.num_computed[decoding]

    def count(self, step: StepInput) -> Int32 | None:
        """Return how many drafts each row verifies, [R]; None if no row has any."""
        if not step.num_drafts:
            return None
        slots, state = step.slots, self._state
        left = state.max_total[slots] - state.num_computed[slots] - step.num_tokens
        drafts: Int32 = np.minimum(np.minimum(self._slots.num_drafts[slots], step.num_drafts), left)
        return drafts if drafts.any() else None

    def input_ids(self, batch: HostBatch) -> Int32:
        """Return the step's tokens, [T]: those that the host was sent, and sampled ones."""
        ids, unknown = batch.token_ids, batch.unknown
        if len(unknown):
            slots = batch.row_slots[unknown]
            offsets = batch.positions[unknown] - self._slots.num_computed[slots]
            ids[unknown] = self._slots.input_ids(slots, offsets.astype(np.int32))
        return ids

    def draft_at(self, slots: Int32, offset: int) -> Int32:
        """Return the draft that each slot has behind `offset` others."""
        drafts: Int32 = self._slots.drafts[slots, offset]
        return drafts

    def accept(self, batch: HostBatch, sampled: Int32, valid: Int64) -> Accepted:
        """Take the tokens that were sampled, and advance the counts of their slots.

        sampled: a token for each of batch.logits_tokens. valid: [S] how many of each row's count;
        at least 1.
        """
        rows = batch.sampling_rows
        slots = batch.slots[rows]
        if batch.num_drafts is None:
            token_ids = last = sampled
            accepted = np.zeros(len(rows), np.int64)
        else:
            sizes, most = batch.sampled_sizes, int(batch.sampled_sizes.max())
            place = np.arange(most)
            tokens = np.full((len(rows), most), -1, np.int32)
            tokens[place < sizes[:, None]] = sampled
            equal = tokens[:, :-1] == self._slots.drafts[slots, : most - 1]
            equal &= place[1:] < valid[:, None]
            accepted = np.cumprod(equal, 1).sum(1)
            token_ids = tokens[place <= accepted[:, None]]
            last = tokens[np.arange(len(rows)), accepted]
            self._state.num_computed[slots] -= (batch.num_drafts[rows] - accepted).astype(np.int32)
        guesses = np.flatnonzero((accepted == valid - 1) & (self._slots.num_drafts[slots] >= valid))
        right = self._slots.drafts[slots[guesses], valid[guesses] - 1] == last[guesses]
        self._slots.num_computed[slots] = self._state.num_computed[slots]
        self._slots.last_sampled[slots] = last
        return Accepted(
            token_ids=token_ids,
            num_accepted=accepted,
            num_drafts=valid - 1,
            num_guesses=len(guesses),
            num_right=int(right.sum()),
        )

    def propose(self, batch: HostBatch, accepted: Accepted, forced: dict[int, Int32]) -> None:
        """Draft the next tokens of the rows that sampled.

        forced: by slot, the tokens that a grammar alone decides, from the row's first one on.
        """
        if self._proposer is None:
            return
        state, begin = self._state, 0
        slots = batch.slots[batch.sampling_rows].tolist()
        for slot, size in zip(slots, (accepted.num_accepted + 1).tolist(), strict=True):
            new, begin = accepted.token_ids[begin : begin + size], begin + size
            end = int(state.num_computed[slot]) + 1
            kept = state.token_ids[slot, end - size : end]
            kept[:] = new[: len(kept)]  # the last token of the longest request has no place
            room = int(min(state.max_drafts[slot], state.max_total[slot] - end))
            drafts = drafts_of_forced(forced.get(slot, new[:0]), new)[: max(0, room)]
            if not len(drafts):
                drafts = self._proposer.propose(slot, state.token_ids[slot, :end], max(0, room))
            self._slots.set_drafts(slot, drafts)

    def describe(
        self, output: StepOutput, step: StepInput, accepted: Accepted, tell: Int32 | None
    ) -> None:
        """Fill in what an output says of drafts.

        tell: slots of the rows that sampled, if the core must know their next drafts.
        """
        if step.num_drafts:
            output.sizes = (accepted.num_accepted + 1).astype(np.int32)
            output.num_drafts = accepted.num_drafts.astype(np.int32)
        output.num_unverified = accepted.num_guesses
        output.num_unverified_right = accepted.num_right
        if tell is not None and self._proposer is not None:
            output.next_sizes = self._slots.num_drafts[tell]
            place = np.arange(self._slots.drafts.shape[1])
            output.next_drafts = self._slots.drafts[tell][place < output.next_sizes[:, None]]
