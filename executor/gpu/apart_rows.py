"""Rows that a step samples apart, from the logits that it has left: masked rows and special rows.

Masked rows are plain but for their masks, which come while the model computes. They are masked in
place and sampled together. Special rows are sampled from float32 copies, one position of all rows
after the other: what changes the logits of a position may depend on the tokens before it, and so
on which of the row's drafts were right.

Order of side effects: all of these rows are sampled before any of their slots advances, and a slot
advances before the next step begins, since all is launched on one stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.gpu.device_tables import StepRows
from sidestep.executor.gpu.step_packer import masked_logits
from sidestep.executor.gpu.token_sampler import TokenSampler, pinned
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.executor.runner.transfer import to_device, to_host
from sidestep.executor.sampling.special_rows import SpecialBatch, SpecialRows
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.transport.slot_columns import device_word
from sidestep.ipc.transport.step import Int32, Int64
from sidestep.kernels.triton.prepare_step_triton import (
    DRAFTS,
    NUM_COMPUTED,
    NUM_DRAFTS,
    SlotTables,
)


@dataclass(frozen=True)
class QueryLogprobs:
    """Log-probabilities of the tokens sampled at one query of some rows."""

    query: int
    of_rows: Logprobs

    def counted(self, sizes: Int32) -> Logprobs:
        """Return those of tokens that count; sizes [R]: tokens of each row that samples."""
        return self.of_rows.chosen(sizes[self.of_rows.keys] > self.query)


class ApartRows:
    """Samples the rows that a step has left out."""

    def __init__(
        self,
        special: SpecialRows,
        sampler: TokenSampler,
        tables: SlotTables,
        rotation: int,
        num_queries: int,
    ) -> None:
        """Allocate the marks. num_queries: most queries of a step."""
        self._special = special
        self._sampler = sampler
        self._tables = tables
        self._device = tables.progress.device
        self._pinned_marks = pinned(rotation, num_queries, self._device)
        self._host_marks = self._pinned_marks.numpy()
        self._marks = torch.zeros(num_queries, dtype=torch.int32, device=self._device)

    def run(
        self, logits: Tensor, batch: HostBatch, apart: Apart, rows: StepRows, position: int
    ) -> list[QueryLogprobs]:
        """Sample the rows, advance their slots, and return the log-probabilities asked for.

        logits [R * Q, V], as the model gave them; masks have been taken. position: of the step's
        buffers in pinned memory.
        """
        if len(apart.masked):
            self._sample_masked(logits, batch, apart.masked, rows, position)
        advancing = apart.special
        if self._sampler.speculates:
            advancing = np.concatenate((apart.masked, apart.special))
        if not len(advancing):
            return []
        valid, marks = self._valid(batch, advancing, rows)
        logprobs = self._sample_special(logits, batch, apart.special, rows, valid)
        self._sampler.advance(rows, valid, marks)
        return logprobs

    def force_drafts(self, forced: Mapping[int, Int32], rows: StepRows) -> None:
        """Let rows that gave the first of their forced tokens have the next ones as drafts.

        forced: by row, the tokens that its grammar alone decides, from the row's first one on.
        """
        if not forced:
            return
        tables, widest = self._tables, max(map(len, forced.values())) + 1
        ids = np.full((len(forced), widest + tables.num_drafts), -1, np.int64)
        for own, tokens in zip(ids, forced.values(), strict=True):
            own[: len(tokens)] = tokens
        wanted = to_device(ids, self._device)
        index = to_device(np.array(list(forced), np.int64), self._device)
        # 1. The tokens that each row gave are those that its slot has advanced past.
        slots = rows.slots.index_select(0, index).long()
        progress = tables.progress.index_select(0, slots)
        first = rows.last_known.index_select(0, index).long() + 1
        given = (progress[:, NUM_COMPUTED] + 1 - first)[:, None]
        offsets = torch.arange(widest, device=self._device)
        places = (first[:, None] + offsets).clamp(max=tables.tokens.shape[1] - 1)
        told = tables.tokens.index_select(0, slots).gather(1, places)
        follows = ((told == wanted[:, :widest]) | (offsets >= given)).all(1, keepdim=True)
        # 2. The drafts are the forced tokens behind them, as many as the slot may have.
        behind = torch.arange(tables.num_drafts, device=self._device)
        drafts = wanted.gather(1, (given + behind).clamp(max=ids.shape[1] - 1))
        limits = tables.parameters.index_select(0, slots)
        room = torch.minimum(
            limits[:, device_word("max_drafts")],
            limits[:, tables.max_total] - progress[:, NUM_COMPUTED] - 1,
        )
        kept = follows & (drafts >= 0) & (behind < room[:, None])
        count = kept.sum(1, keepdim=True)
        made = torch.cat((count, drafts), 1).to(torch.int32)
        changed = torch.where(count > 0, made, progress[:, NUM_DRAFTS:])
        tables.progress.index_copy_(0, slots, torch.cat((progress[:, :NUM_DRAFTS], changed), 1))

    def _valid(self, batch: HostBatch, advancing: Int64, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Return each row's queries that count, and a mark for rows that advance; int32 [R].

        A row with a grammar has no more of these queries than masks, and does not advance without
        any.
        """
        columns, slots = (
            np.zeros((2, -(-len(rows.slots) // 4) * 4), np.int32),
            batch.slots[advancing],
        )
        held, masks = self._special.has_grammar(slots), self._special.masks
        most, marks = columns
        most[advancing] = np.where(held, 1 + masks.num_masked_drafts(slots), rows.queries)
        marks[advancing] = ~held | (masks.marks(slots) > 0)
        limits, on_device = to_device(columns, self._device)[:, : len(rows.slots)]
        if rows.queries == 1:
            return rows.valid, on_device
        return torch.minimum(rows.valid, limits), on_device

    def _sample_masked(
        self, logits: Tensor, batch: HostBatch, masked: Int64, rows: StepRows, position: int
    ) -> None:
        """Sample plain rows that had to wait for their masks.

        The step's message still holds what else is needed, so this takes one small copy and three
        kernels. A mark holds both a query's mask index and that it is sampled.
        """
        count = len(batch.slots) * rows.queries
        marks, on_device = self._host_marks[position], self._marks[:count]
        marks[:count] = 0
        for query in range(rows.queries):
            marks[masked * rows.queries + query] = self._special.masks.marks(
                batch.slots[masked], query
            )
        on_device.copy_(self._pinned_marks[position, :count], non_blocking=True)
        logits = logits[:count]
        self._special.masks.mask(logits, on_device)
        self._sampler.sample_plain(logits, rows, on_device)

    def _sample_special(
        self, logits: Tensor, batch: HostBatch, special: Int64, rows: StepRows, valid: Tensor
    ) -> list[QueryLogprobs]:
        found = []
        for part in self._special.parts(batch, special, special * rows.queries):
            counts = None  # whether the token at a query follows from right drafts
            for query in range(rows.queries):
                tokens, logprobs = self._sample_query(
                    logits, batch.state, part, rows, query, counts
                )
                if logprobs is not None:
                    found.append(QueryLogprobs(query, logprobs))
                if query + 1 < rows.queries:
                    counts = self._goes_on(part, rows, valid, query, tokens, counts)
        return found

    def _sample_query(
        self,
        logits: Tensor,
        state: HostTables,
        part: SpecialBatch,
        rows: StepRows,
        query: int,
        counts: Tensor | None,
    ) -> tuple[Tensor, Logprobs | None]:
        """Sample one query of special rows; return the tokens, and log-probabilities asked for.

        counts: bool [n], where a token does not count; None if all do.
        """
        index, number = part.logits_rows + query, len(part.slots)
        wide = logits.index_select(0, index).float()
        self._special.masks.offset = query
        self._special.before_sampling(wide, part)
        lens = rows.query_lens.index_select(0, index)
        masked_rows, *masked = masked_logits(state, part.slots, part.seq_lens)
        if len(masked_rows):
            row, token, length = to_device(
                np.stack((masked_rows, *masked)).astype(np.int64), self._device
            )
            early = lens.index_select(0, row) < length
            # Added, not written: the logits of rows that are long enough stay.
            wide.index_put_((row, token), torch.where(early, -torch.inf, 0.0), accumulate=True)
        columns = np.ones((3, -(-number // 4) * 4), np.int32)  # aligned as compiled for
        columns[0, 0], columns[1, :number] = number, part.slots
        header, slots, marks = to_device(columns, self._device)
        sampled = self._sampler.sample_copies(wide, header, slots[:number], lens, marks[:number])
        self._sampler.sampled.index_copy_(0, index, sampled)
        tokens = sampled.long()
        self._special.tell(tokens if counts is None else torch.where(counts, tokens, -1), part)
        return tokens, self._special.logprobs(
            logits, tokens, part, index, lambda asking: self._positions(lens, asking)
        )

    def _positions(self, lens: Tensor, asking: Int64) -> Int64:
        """Return the positions of tokens, which are there when the step has ended."""
        chosen = lens if len(asking) == len(lens) else lens[to_device(asking, self._device)]
        return to_host(chosen.long()).numpy()

    def _goes_on(
        self,
        part: SpecialBatch,
        rows: StepRows,
        valid: Tensor,
        query: int,
        tokens: Tensor,
        counts: Tensor | None,
    ) -> Tensor:
        """Return whether the token behind a query's token counts too: its draft was right."""
        drafts = self._tables.progress[:, DRAFTS + query].index_select(0, part.slot_index)
        there = valid.index_select(0, part.logits_rows // rows.queries) > query + 1
        right = (tokens == drafts) & there
        return right if counts is None else counts & right
