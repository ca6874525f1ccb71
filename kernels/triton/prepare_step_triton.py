"""Inputs of a step, made on the device from its packed message: the first kernel of every step.

There is one program for each row. It appends the row's new blocks to its block table, stores the
parameters of a request that enters, and writes the row's tokens. The host may not know the position
of the row's first token, the token that the slot sampled last, and the drafts behind it. They come
from the slot's own progress.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import next_power_of_2
from sidestep.kernels.launch_order import completes

HEADER = 16
"""Number of integers in the header at the start of the message."""
MASKED, RECORDS, SAMPLING, ROWS = 3, 5, 8, 12
"""Indices in the header."""
ROW_COLUMNS = (
    "slots",
    "starts",
    "query_starts",
    "samples",
    "num_blocks",
    "block_starts",
    "enters",
)
NUM_COMPUTED, LAST_SAMPLED, NUM_DRAFTS, DRAFTS = 0, 1, 2, 3
"""Columns of a slot's progress; the drafts come last."""
NUM_COMPUTED_COLUMN = tl.constexpr(NUM_COMPUTED)
LAST_SAMPLED_COLUMN = tl.constexpr(LAST_SAMPLED)
NUM_DRAFTS_COLUMN = tl.constexpr(NUM_DRAFTS)
DRAFTS_COLUMN = tl.constexpr(DRAFTS)
_RECORDS = tl.constexpr(RECORDS)


@dataclass(frozen=True)
class StepLayout:
    """Positions of the columns of a packed step, in int32 words.

    It is for steps of up to `rows` rows and `tokens` token ids. A step with drafts has one id a
    row.

    The header holds the numbers of rows, decode rows, tokens and masked logits, the word where the
    masked logits are listed, and at RECORDS the word where records begin. From SAMPLING on it holds
    the number of sampled positions and the row of the output, and from ROWS on the number of rows
    and again the row of the output. The columns of ROW_COLUMNS follow, each of rows + 1 words
    (starts have one more entry than there are rows). Then come the token ids (-1: unknown), the new
    block ids of all rows, the masked logits (rows, tokens, then the lengths below which they are
    masked), and the records of entering requests. A row's `enters` is the number of its record,
    counted from 1; its `starts` is the position of its first token, -1 where only the slot knows.
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
    """Device tables with one row a slot, int32."""

    block_tables: Tensor
    """[groups, slots, blocks of the longest request], by cache group."""
    parameters: Tensor
    """[slots, words of a record]: as they stand in the message."""
    progress: Tensor
    """[slots, DRAFTS + most drafts]: tokens computed, the token sampled last, which no step has
    computed yet, the number of drafts behind it, and the drafts."""
    tokens: Tensor
    """[slots, tokens of the longest request]: known and sampled tokens by position, where drafts
    are looked up; [slots, 0] elsewhere."""
    max_total: int
    """Index of the word in `parameters` that has the request's most tokens."""

    @property
    def num_drafts(self) -> int:
        """The most drafts of a slot."""
        return self.progress.shape[1] - DRAFTS


@dataclass(frozen=True)
class StepInputs:
    """The kernel's outputs for the tokens and rows of a step, int32; T tokens, R rows."""

    token_ids: Tensor
    """[T] 0 for padding."""
    positions: Tensor
    """[T] 0 for padding."""
    slot_mapping: Tensor
    """[groups, T] Block id * block size + offset; -1 for padding and for tokens that do not
    count."""
    last_tokens: Tensor
    """[R] The index of each row's last token, 0 for padding; only without drafts."""
    seq_lens: Tensor
    """[R] Tokens in the cache after this step, all Q queries of a row with drafts counted."""
    last_known: Tensor
    """[R] Position of the last token that is no draft."""
    valid: Tensor
    """[R] Queries of a row that count: 1, and its drafts."""
    valid_lens: Tensor
    """[R] Tokens in the cache up to the last query that counts."""
    query_slots: Tensor
    query_lens: Tensor
    query_samples: Tensor
    """[R * Q] Of each query of a row with drafts: its slot, the position of the token sampled
    behind it, and whether one is; not written without drafts."""


_RUNTIME = (
    "group_stride",
    "table_stride",
    "mapping_stride",
    "progress_stride",
    "tokens_stride",
    "longest",
    "rows",
    "tokens",
    "column",
    "ids",
    "blocks",
)
"""Parameters that differ from graph to graph; no kernel is compiled for each of their values."""


@triton.jit
def _append_blocks(message, table, columns, column, blocks, within, BLOCK: tl.constexpr):
    """Append a row's new blocks to its block table."""
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


@triton.jit
def _map_slots(
    table,
    group_stride,
    slot_mapping,
    mapping_stride,
    index,
    position,
    counts,
    there,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write where tokens at these positions of a request go in each group's cache.

    table: the request's block table of the first group.
    """
    for group in tl.static_range(GROUPS):
        block = tl.load(table + group * group_stride + position // PAGE, mask=counts, other=0)
        place = tl.where(counts, block * PAGE + position % PAGE, -1)
        tl.store(slot_mapping + group * mapping_stride + index, place, mask=there)


@triton.jit
def _write_queries(
    given,
    start,
    end,
    samples,
    slot,
    row,
    table,
    group_stride,
    own,
    token_ids,
    positions,
    slot_mapping,
    mapping_stride,
    seq_lens,
    last_known,
    valid,
    valid_lens,
    query_slots,
    query_lens,
    query_samples,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    Q: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Write the Q tokens of a row with drafts.

    end: the position at which the request ends; no token lies there or behind. own: the slot's
    progress.
    """
    query = tl.arange(0, QUERIES)
    start = tl.minimum(start, end)
    count = tl.minimum(tl.load(own + NUM_DRAFTS_COLUMN) + 1, tl.minimum(end - start, Q))
    count = tl.maximum(count, 1)
    known = tl.where(given < 0, tl.load(own + LAST_SAMPLED_COLUMN), given)
    draft = tl.load(own + DRAFTS_COLUMN + query - 1, mask=(query > 0) & (query < count), other=0)
    position = start + query
    counts = (query < count) & (position < end)
    position = tl.maximum(tl.minimum(position, end - 1), 0)
    index = row * Q + query
    there = query < Q
    tl.store(token_ids + index, tl.where(query == 0, known, draft), mask=there)
    tl.store(positions + index, position, mask=there)
    _map_slots(
        table,
        group_stride,
        slot_mapping,
        mapping_stride,
        index,
        position,
        counts,
        there,
        PAGE,
        GROUPS,
    )
    tl.store(query_slots + index, slot.to(tl.int32) + tl.zeros_like(query), mask=there)
    tl.store(query_lens + index, start + query + 1, mask=there)
    tl.store(
        query_samples + index,
        ((samples != 0) & (query < count)).to(tl.int32),
        mask=there,
    )
    tl.store(seq_lens + row, start + Q)
    tl.store(last_known + row, start)
    tl.store(valid + row, count)
    tl.store(valid_lens + row, tl.minimum(start + count, end))


@completes(
    "message",
    "block_tables",
    "token_ids",
    "positions",
    "slot_mapping",
    "last_tokens",
    "seq_lens",
    "valid_lens",
)
@triton.jit(do_not_specialize=_RUNTIME)
def _prepare(
    message,
    block_tables,
    parameters,
    progress,
    slot_tokens,
    token_ids,
    positions,
    slot_mapping,
    last_tokens,
    seq_lens,
    last_known,
    valid,
    valid_lens,
    query_slots,
    query_lens,
    query_samples,
    group_stride,
    table_stride,
    mapping_stride,
    progress_stride,
    tokens_stride,
    longest,
    rows,
    tokens,
    column,
    ids,
    blocks,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    RECORD: tl.constexpr,
    MAX_TOTAL: tl.constexpr,
    PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    Q: tl.constexpr,
    QUERIES: tl.constexpr,
):
    row = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    num_rows = tl.load(message)
    if row == rows:  # the last program: tokens that are padding
        for first in range(tl.load(message + 2), tokens, BLOCK):
            index = first + within
            tl.store(token_ids + index, 0, mask=index < tokens)
            tl.store(positions + index, 0, mask=index < tokens)
            for group in tl.static_range(GROUPS):
                tl.store(slot_mapping + group * mapping_stride + index, -1, mask=index < tokens)
        return
    if row >= num_rows:
        if Q == 1:
            tl.store(last_tokens + row, 0)
        return
    columns = message + COLUMNS + row
    slot = tl.load(columns).to(tl.int64)
    table = block_tables + slot * table_stride
    own = progress + slot * progress_stride
    # 1. Append the new blocks.
    _append_blocks(message, table, columns, column, blocks, within, BLOCK)
    # 2. Store the parameters of a request that enters. It has no drafts yet.
    enters = tl.load(columns + 6 * column)
    if enters != 0:
        word = tl.arange(0, RECORD)
        record = message + tl.load(message + _RECORDS) + (enters - 1) * WORDS
        tl.store(
            parameters + slot * WORDS + word,
            tl.load(record + word, mask=word < WORDS, other=0),
            mask=word < WORDS,
        )
        tl.store(own + NUM_DRAFTS_COLUMN, 0)
    # 3. Write the tokens. Other threads of this program wrote the tables.
    tl.debug_barrier()
    start = tl.load(columns + column)
    start = tl.where(start < 0, tl.load(own + NUM_COMPUTED_COLUMN), start)
    end = tl.load(parameters + slot * WORDS + MAX_TOTAL)
    if Q > 1:
        given = tl.load(message + ids + row)
        # The token that was sampled is noted already.
        there = (given >= 0) & (start < tl.minimum(end, longest))
        tl.store(slot_tokens + slot * tokens_stride + start, given, mask=there)
        _write_queries(
            given,
            start,
            end,
            tl.load(columns + 3 * column),
            slot,
            row,
            table,
            group_stride,
            own,
            token_ids,
            positions,
            slot_mapping,
            mapping_stride,
            seq_lens,
            last_known,
            valid,
            valid_lens,
            query_slots,
            query_lens,
            query_samples,
            PAGE,
            GROUPS,
            Q,
            QUERIES,
        )
    else:
        first_token = tl.load(columns + 2 * column)
        last_token = tl.load(columns + 2 * column + 1)
        sampled = tl.load(own + LAST_SAMPLED_COLUMN)
        length = tl.minimum(start + last_token - first_token, end)
        tl.store(last_tokens + row, last_token - 1)
        tl.store(seq_lens + row, length)
        tl.store(last_known + row, length - 1)
        tl.store(valid + row, 1)
        for first in range(first_token, last_token, BLOCK):
            index = first + within
            there = index < last_token
            given = tl.load(message + ids + index, mask=there, other=0)
            position = start + index - first_token
            counts = there & (position < end)
            tl.store(
                slot_tokens + slot * tokens_stride + position,
                given,
                mask=counts & (given >= 0) & (position < longest),
            )
            position = tl.maximum(tl.minimum(position, end - 1), 0)
            tl.store(token_ids + index, tl.where(given < 0, sampled, given), mask=there)
            tl.store(positions + index, position, mask=there)
            _map_slots(
                table,
                group_stride,
                slot_mapping,
                mapping_stride,
                index,
                position,
                counts,
                there,
                PAGE,
                GROUPS,
            )


def prepare_step(
    message: Tensor,
    layout: StepLayout,
    tables: SlotTables,
    inputs: StepInputs,
    block_size: int,
    queries: int = 1,
) -> None:
    """Apply a step's differences to the tables and write the inputs of its tokens.

    message int32, laid out as `layout` says. T and R, the sizes of `inputs`, are at most the
    layout's; the last tokens are padding. queries: Q. If it is more than 1, each row has one token
    and up to Q - 1 of its slot's drafts, and T is R * Q. Queries that do not count, and all that
    would lie behind a request's end, write nothing to the cache and read no table behind its end.
    """
    rows = inputs.seq_lens.shape[0]
    words = tables.parameters.shape[1]
    _prepare[(rows + 1,)](
        message,
        tables.block_tables,
        tables.parameters,
        tables.progress,
        tables.tokens,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.last_tokens,
        inputs.seq_lens,
        inputs.last_known,
        inputs.valid,
        inputs.valid_lens,
        inputs.query_slots,
        inputs.query_lens,
        inputs.query_samples,
        tables.block_tables.stride(0),
        tables.block_tables.stride(1),
        inputs.slot_mapping.stride(0),
        tables.progress.stride(0),
        tables.tokens.stride(0),
        tables.tokens.shape[1],
        rows,
        inputs.token_ids.shape[0],
        layout.column,
        layout.token_ids,
        layout.block_ids,
        HEADER,
        words,
        next_power_of_2(words),
        tables.max_total,
        block_size,
        len(tables.block_tables),
        256,
        queries,
        next_power_of_2(queries),
        num_warps=2,
    )
