"""Device memory of a GPU's runner: the tables by slot, and the columns of one step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.gpu.cuda_graphs import StepSizes, most_queries
from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.slot_columns import DEVICE_WORDS, device_word
from sidestep.ipc.transport.step import StepInput
from sidestep.kernels.ops.speculation import DraftTables
from sidestep.kernels.triton.prepare_step_triton import (
    DRAFTS,
    LAST_SAMPLED,
    NUM_COMPUTED,
    NUM_DRAFTS,
    ROWS,
    SAMPLING,
    SlotTables,
    StepInputs,
    StepLayout,
)
from sidestep.kernels.triton.sampling_triton import SamplingWords

SAMPLING_WORDS = SamplingWords(*map(device_word, SamplingWords._fields))
"""Where the sampler finds a request's parameters."""


def make_slot_tables(
    limits: StepLimits,
    max_model_len: int,
    block_size: int,
    num_groups: int,
    device: torch.device,
    *,
    last: bool,
) -> SlotTables:
    """Allocate the tables by slot.

    num_groups: cache groups of the model. last: whether drafts are looked up here.
    """
    slots, drafts = limits.num_slots, limits.num_drafts

    def table(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    return SlotTables(
        # The drafts of a row may lie behind its end; then the tables are read there, and no more.
        # To whole 16 bytes, which kernels rely on.
        block_tables=table(num_groups, slots, -(-(max_model_len + drafts) // (4 * block_size)) * 4),
        parameters=table(slots, DEVICE_WORDS),
        progress=table(slots, DRAFTS + drafts),
        tokens=table(slots, max_model_len if last and drafts else 0),
        max_total=device_word("max_total"),
    )


def place_blocks(block_tables: Tensor, step: StepInput) -> None:
    """Set a step's entries in the block tables [groups, slots, blocks] of groups with a window."""
    if len(step.placed_slots):
        columns = np.stack(
            [step.placed_groups, step.placed_slots, step.placed_indices, step.placed_blocks]
        )
        *entries, blocks = to_device(columns.astype(np.int64), block_tables.device)
        block_tables[tuple(entries)] = blocks.int()


def draft_tables(tables: SlotTables) -> DraftTables:
    """Return the tables as those that accept and look up drafts see them."""
    progress, parameters = tables.progress, tables.parameters
    return DraftTables(
        last_sampled=progress[:, LAST_SAMPLED],
        num_computed=progress[:, NUM_COMPUTED],
        drafts=progress[:, DRAFTS:],
        num_drafts=progress[:, NUM_DRAFTS],
        tokens=tables.tokens,
        draft_limit=parameters[:, device_word("max_drafts")],
        max_total=parameters[:, tables.max_total],
    )


@dataclass(frozen=True)
class StepRows:
    """The rows of one step on the device, R of them with padding; each has Q queries."""

    queries: int
    """Q: 1, and the drafts of a row."""
    by_query: Tensor
    """int32: the number of queries that count, and the row of the step's output."""
    by_row: Tensor
    """int32: the number of rows that count, and the row of the step's output."""
    slots: Tensor
    samples: Tensor
    """[R] 0 for rows that do not sample, or not with the others."""
    seq_lens: Tensor
    last_known: Tensor
    valid: Tensor
    valid_lens: Tensor
    """[R] See StepInputs."""
    query_slots: Tensor
    query_lens: Tensor
    query_samples: Tensor
    """[R * Q] See StepInputs. Without drafts they are the columns of the rows."""


class RowColumns:
    """Memory for the columns that the first kernel of a step writes for its rows."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        rows, queries = limits.max_num_seqs, most_queries(limits)

        def column(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._of_rows = [column(rows) for _ in range(4)]
        self._of_queries = [column(queries if limits.num_drafts else 1) for _ in range(3)]

    def step_rows(self, message: Tensor, layout: StepLayout, count: int, queries: int) -> StepRows:
        """Return the rows of a step, the first `count` of each column."""

        def given(name: str) -> Tensor:
            return message[layout.at(name) : layout.at(name) + count]

        seq_lens, *others = (column[:count] for column in self._of_rows)
        slots, samples = given("slots"), given("samples")
        return StepRows(
            queries,
            message[SAMPLING:],
            message[ROWS:],
            slots,
            samples,
            seq_lens,
            *others,
            *(
                (slots, seq_lens, samples)
                if queries == 1
                else (column[: count * queries] for column in self._of_queries)
            ),
        )

    def step_inputs(self, sizes: StepSizes, *by_token: Tensor) -> StepInputs:
        """Return what the first kernel writes: these inputs, and the columns of the rows.

        by_token: token_ids, positions, slot_mapping and last_tokens.
        """
        return StepInputs(
            *by_token,
            *(column[: sizes.rows] for column in self._of_rows),
            *(column[: sizes.rows * sizes.queries] for column in self._of_queries),
        )
