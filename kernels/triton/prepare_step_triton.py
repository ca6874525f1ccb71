"""Inputs of a step, made on the device from its packed message: the first kernel of every step.

There is one program for each row. It appends the row's new blocks to its block table, stores the
parameters of a request that enters, and writes the row's tokens. A token id that the host does not
know yet is the token that the slot sampled last.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch_order import completes

HEADER = 16
"""Number of integers in the header at the start of the message."""
MASKED, SAMPLING = 3, 8
"""Indices in the header."""
ROW_COLUMNS = (
    "slots",
    "seq_lens",
    "query_starts",
    "samples",
    "num_blocks",
    "block_starts",
    "enters",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "seed_low",
    "seed_high",
)


@dataclass(frozen=True)
class StepLayout:
    """Positions of the columns of a packed step, in int32 words.

    It is for steps of up to `rows` rows and `tokens` tokens.

    The header holds the numbers of rows, decode rows, tokens and masked logits, and the word where
    the masked logits are listed. From SAMPLING on it holds the number of rows and the row of the
    output. The columns of ROW_COLUMNS follow, each of rows + 1 words (starts have one more entry
    than there are rows). Then come the token ids (-1: unknown), the new block ids of all rows, and
    the masked logits: rows, then tokens.
    """

    rows: int
    tokens: int

    @property
    def column(self) -> int:
        """Words from one column to the next; a multiple of 4, which aligns columns to 16 bytes."""
        return (self.rows + 1 + 3) // 4 * 4

    def at(self, name: str) -> int:
        """Return the index of the first word of a column."""
        return HEADER + ROW_COLUMNS.index(name) * self.column

    @property
    def token_ids(self) -> int:
        """Index of the first word of the token ids."""
        return HEADER + len(ROW_COLUMNS) * self.column

    @property
    def block_ids(self) -> int:
        """Index of the first word of the new block ids."""
        return self.token_ids + (self.tokens + 3) // 4 * 4


@dataclass(frozen=True)
class SlotTables:
    """Device tables with one row a slot."""

    block_tables: Tensor
    """int32 [slots, blocks of the longest request]"""
    last_sampled: Tensor
    """int32 [slots]"""
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    """float32 [slots]"""
    top_k: Tensor
    """int32 [slots]"""
    seed: Tensor
    """int64 [slots]"""


_RUNTIME = ("table_stride", "rows", "tokens", "column", "ids", "blocks")
"""Parameters that differ from graph to graph; no kernel is compiled for each of their values."""


@completes("message", "block_tables", "token_ids", "positions", "slot_mapping", "last_tokens")
@triton.jit(do_not_specialize=_RUNTIME)
def _prepare(
    message,
    block_tables,
    last_sampled,
    temperature,
    top_p,
    min_p,
    top_k,
    seed,
    token_ids,
    positions,
    slot_mapping,
    last_tokens,
    table_stride,
    rows,
    tokens,
    column,
    ids,
    blocks,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    num_rows = tl.load(message)
    if row == rows:  # the last program: tokens that are padding
        for start in range(tl.load(message + 2), tokens, BLOCK):
            index = start + within
            tl.store(token_ids + index, 0, mask=index < tokens)
            tl.store(positions + index, 0, mask=index < tokens)
            tl.store(slot_mapping + index, -1, mask=index < tokens)
        return
    if row >= num_rows:
        tl.store(last_tokens + row, 0)
        return
    columns = message + COLUMNS + row
    slot = tl.load(columns).to(tl.int64)
    # 1. Append the new blocks.
    table = block_tables + slot * table_stride
    held = tl.load(columns + 4 * column)
    first = tl.load(columns + 5 * column)
    last = tl.load(columns + 5 * column + 1)
    for start in range(first, last, BLOCK):
        index = start + within
        tl.store(
            table + held + index - first,
            tl.load(message + blocks + index, mask=index < last),
            mask=index < last,
        )
    # 2. Store the parameters of a request that enters.
    if tl.load(columns + 6 * column) != 0:
        tl.store(temperature + slot, tl.load(columns + 7 * column).to(tl.float32, bitcast=True))
        tl.store(top_p + slot, tl.load(columns + 8 * column).to(tl.float32, bitcast=True))
        tl.store(min_p + slot, tl.load(columns + 9 * column).to(tl.float32, bitcast=True))
        tl.store(top_k + slot, tl.load(columns + 10 * column))
        low = tl.load(columns + 11 * column).to(tl.int64) & 0xFFFFFFFF
        tl.store(seed + slot, (tl.load(columns + 12 * column).to(tl.int64) << 32) | low)
    # 3. Write the tokens. Other threads of this program wrote the block table.
    tl.debug_barrier()
    begin = tl.load(columns + 2 * column)
    end = tl.load(columns + 2 * column + 1)
    sampled = tl.load(last_sampled + slot)
    shift = tl.load(columns + column) - end
    tl.store(last_tokens + row, end - 1)
    for start in range(begin, end, BLOCK):
        index = start + within
        given = tl.load(message + ids + index, mask=index < end, other=0)
        position = index + shift
        block = tl.load(table + position // PAGE, mask=index < end, other=0)
        tl.store(token_ids + index, tl.where(given < 0, sampled, given), mask=index < end)
        tl.store(positions + index, position, mask=index < end)
        tl.store(slot_mapping + index, block * PAGE + position % PAGE, mask=index < end)


def prepare_step(
    message: Tensor,
    layout: StepLayout,
    tables: SlotTables,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    last_tokens: Tensor,
    block_size: int,
) -> None:
    """Apply a step's differences to the tables and write the inputs of its tokens.

    message int32, laid out as `layout` says. Written: token_ids, positions and slot_mapping, int32
    [T] with padding (0, 0 and -1); slot_mapping is block id * block size + offset. Also written:
    last_tokens int32 [R], the index of each row's last token, 0 for padding. T and R are at most
    the layout's.
    """
    rows = last_tokens.shape[0]
    _prepare[(rows + 1,)](
        message,
        tables.block_tables,
        tables.last_sampled,
        tables.temperature,
        tables.top_p,
        tables.min_p,
        tables.top_k,
        tables.seed,
        token_ids,
        positions,
        slot_mapping,
        last_tokens,
        tables.block_tables.stride(0),
        rows,
        token_ids.shape[0],
        layout.column,
        layout.token_ids,
        layout.block_ids,
        HEADER,
        block_size,
        256,
        num_warps=2,
    )
