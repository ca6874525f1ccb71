"""A worker's tables: one row for each slot, changed only by the differences that a step brings.

They hold everything that can be known without the sampled tokens, and so without waiting for the
device: the count of tokens that a row has computed advances by the step's own numbers. Sampled
tokens are kept by the runner.
"""

from __future__ import annotations

import numpy as np

from sidestep.ipc.transport.slot_columns import empty_tables
from sidestep.ipc.transport.step import StepInput


class HostTables:
    """Rows of requests, by slot."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        *,
        has_states: bool = False,
    ) -> None:
        """Begin with empty rows.

        num_groups: cache groups of the model. has_states: whether it has recurrent layers.
        """
        self.has_states = has_states
        max_blocks = -(-max_model_len // block_size)
        # Large but mostly untouched: memory is taken only for what requests fill.
        self.token_ids = np.zeros((num_slots, max_model_len), np.int32)
        self.block_tables = np.zeros((num_groups, num_slots, max_blocks), np.int32)
        """[groups, slots, blocks of the longest request]"""
        self.records = empty_tables(num_slots)
        self.num_known = self.records["num_known"]
        self.num_prompt = self.records["num_prompt"]
        self.num_computed = self.records["num_computed"]
        self.temperature = self.records["temperature"]
        self.top_p = self.records["top_p"]
        self.min_p = self.records["min_p"]
        self.top_k = self.records["top_k"]
        self.seed = self.records["seed"]
        self.temperature_last = self.records["temperature_last"]
        self.min_tokens = self.records["min_tokens"]
        self.max_total = self.records["max_total"]
        self.max_drafts = self.records["max_drafts"]
        self.num_blocks = np.zeros(num_slots, np.int32)
        """[slots] Blocks in the tables of the group of full attention."""
        self.entries = np.zeros(num_slots, np.int64)
        self._num_entries = 0
        self.stop_ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = [
            np.empty(0, np.int32)
        ] * num_slots

    def apply(self, step: StepInput) -> None:
        """Enter new requests and append new blocks."""
        if len(step.entering):
            self._enter(step)
        if len(step.block_ids):
            self._append_blocks(step)
        if len(step.placed_slots):
            entries = step.placed_groups, step.placed_slots, step.placed_indices
            self.block_tables[entries] = step.placed_blocks

    def _enter(self, step: StepInput) -> None:
        slots = step.entering["slot"]
        self.records[slots] = step.entering
        self.num_blocks[slots] = 0
        self.entries[slots] = np.arange(len(slots)) + self._num_entries + 1
        self._num_entries += len(slots)
        for slot, positions, tokens, stops, _ in step.entering_rows():
            self.token_ids[slot, positions] = step.new_token_ids[tokens]
            # A copy: the step's columns are views over memory that is reused.
            self.stop_ids[slot] = step.new_stop_ids[stops].copy()

    def _append_blocks(self, step: StepInput) -> None:
        counts = step.num_new_blocks
        rows = np.repeat(step.slots, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.num_blocks[rows] + np.arange(len(rows)) - first
        self.block_tables[0, rows, columns] = step.block_ids
        self.num_blocks[step.slots] += counts
