"""The kernel that unpacks a step, over random sequences of steps, against plain Python tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.kernels.triton.prepare_step_triton import (
    DRAFTS,
    HEADER,
    LAST_SAMPLED,
    MASKED,
    NUM_COMPUTED,
    NUM_DRAFTS,
    RECORDS,
    ROW_COLUMNS,
    ROWS,
    SAMPLING,
    SlotTables,
    StepInputs,
    StepLayout,
    prepare_step,
)
from tests.triton.support import (
    DEVICE,
    assert_margins_untouched,
    assert_untouched,
    guarded,
    int32,
    poisoned,
    unchanged,
)

ODD = -1234567
"""Number that fills the unused parts of the message."""
WORDS, MAX_TOTAL = 7, 5
"""Words of a record, and the one that has the most tokens of a request."""
MOST_DRAFTS = 4
FAR = 10**6
"""A number of tokens that no request of these tests reaches."""


def record(max_total: int = FAR, seed: int = 0) -> list[int]:
    """Return the words of a request that enters."""
    words = random.Random(seed).choices(range(-(2**31), 2**31), k=WORDS)
    words[MAX_TOTAL] = max_total
    return words


@dataclass
class Row:
    """One request in one step. held: number of blocks that its table has already."""

    slot: int
    seq_len: int
    token_ids: Sequence[int]
    held: int = 0
    new_blocks: Sequence[int] = ()
    enters: list[int] | None = None
    start_known: bool = True
    samples: int = 1


def starts(counts: Sequence[int]) -> list[int]:
    sums: list[int] = np.cumsum([0, *counts]).tolist()
    return sums


def pack(layout: StepLayout, rows: Sequence[Row], queries: int = 1) -> Tensor:
    """Return the message that StepLayout and prepare_step describe.

    Its unused parts hold an odd number.
    """
    block_ids = [block for row in rows for block in row.new_blocks]
    token_ids = [token for row in rows for token in row.token_ids]
    records = [row.enters for row in rows if row.enters is not None]
    columns = {
        "slots": [row.slot for row in rows],
        "starts": [row.seq_len - len(row.token_ids) if row.start_known else -1 for row in rows],
        "query_starts": [n * queries for n in starts([len(row.token_ids) for row in rows])],
        "samples": [row.samples for row in rows],
        "num_blocks": [row.held for row in rows],
        "block_starts": starts([len(row.new_blocks) for row in rows]),
        "enters": [
            sum(r.enters is not None for r in rows[: i + 1]) * (row.enters is not None)
            for i, row in enumerate(rows)
        ],
    }
    assert columns.keys() == set(ROW_COLUMNS)
    behind = layout.block_ids + len(block_ids) + 3
    message = np.full(behind + len(records) * WORDS + 5, ODD, np.int32)
    for name, column in columns.items():
        message[layout.at(name) : layout.at(name) + len(column)] = column
    message[layout.token_ids : layout.token_ids + len(token_ids)] = token_ids
    message[layout.block_ids : layout.block_ids + len(block_ids)] = block_ids
    message[behind : behind + len(records) * WORDS] = np.array(records, np.int32).reshape(-1)
    message[:3] = (
        len(rows),
        sum(len(row.token_ids) == 1 for row in rows),
        len(token_ids) * queries,
    )
    message[MASKED], message[RECORDS] = 0, behind
    message[SAMPLING], message[ROWS] = len(rows) * queries, len(rows)
    return guarded(torch.from_numpy(message).to(DEVICE))


def fresh_tables(slots: int, width: int, longest: int) -> SlotTables:
    # A table's rows lie further apart than they are long.
    def table(columns: int, more: int = 0) -> Tensor:
        return poisoned(slots, columns + more, dtype=torch.int32)[:, :columns]

    block_tables = poisoned(GROUPS, slots, width + 3, dtype=torch.int32)[..., :width]
    entries = torch.arange(slots * width, dtype=torch.int32).view(slots, width)
    for group in range(1, GROUPS):  # these tables have their entries already
        block_tables[group] = entries.to(DEVICE) + 1000 * group
    return SlotTables(
        block_tables,
        table(WORDS),
        table(DRAFTS + MOST_DRAFTS, 2),
        table(longest, 3 if longest else 0),
        max_total=MAX_TOTAL,
    )


GROUPS = 3
TABLES = ("block_tables", "parameters", "progress", "tokens")


@dataclass
class Model:
    """The device tables together with their expected contents, as lists of integers."""

    tables: SlotTables
    page: int
    expected: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = {name: getattr(self.tables, name).tolist() for name in TABLES}

    def _enter(self, rows: Sequence[Row]) -> None:
        for row in rows:
            table = self.expected["block_tables"][0][row.slot]
            table[row.held : row.held + len(row.new_blocks)] = row.new_blocks
            if row.enters is not None:
                self.expected["parameters"][row.slot] = row.enters
                self.expected["progress"][row.slot][NUM_DRAFTS] = 0

    def _first(self, row: Row) -> int:
        """Return the position of a row's first token."""
        if row.start_known:
            return row.seq_len - len(row.token_ids)
        return int(self.expected["progress"][row.slot][NUM_COMPUTED])

    def _places(self, slot: int, position: int) -> list[int]:
        """Return where a token goes, by cache group."""
        blocks = [table[slot][position // self.page] for table in self.expected["block_tables"]]
        return [block * self.page + position % self.page for block in blocks]

    def _note(self, slot: int, position: int, token: int) -> None:
        known = self.expected["tokens"][slot]
        if token >= 0 and position < len(known):
            known[position] = token

    def _of_tokens(self, rows: Sequence[Row], tokens: int) -> list[list[Any]]:
        """Return token_ids, positions and slot mapping of a step without drafts."""
        out = []
        for row in rows:
            for i, token in enumerate(row.token_ids):
                position = self._first(row) + i
                known = token if token >= 0 else self.expected["progress"][row.slot][LAST_SAMPLED]
                out.append((known, position, self._places(row.slot, position)))
                self._note(row.slot, position, token)
        out += [(0, 0, [-1] * GROUPS)] * (tokens - len(out))
        ids, positions, places = (list(column) for column in zip(*out, strict=True))
        return [ids, positions, [list(group) for group in zip(*places, strict=True)]]

    def step(
        self, layout: StepLayout, rows: Sequence[Row], room: tuple[int, int] | None = None
    ) -> None:
        """Run the kernel and this model, and compare all memory that either has written.

        room: rows and tokens that the step's outputs are made for, if less than the message may
        hold.
        """
        num_rows, num_tokens = room or (layout.rows, layout.tokens)
        self._enter(rows)
        inputs = make_inputs(num_rows, num_tokens, 1)
        self._run(pack(layout, rows), layout, inputs, 1)
        padding = num_rows - len(rows)
        last_tokens = [end - 1 for end in starts([len(row.token_ids) for row in rows])[1:]]
        lens = [self._first(row) + len(row.token_ids) for row in rows]
        columns = [*self._of_tokens(rows, num_tokens), last_tokens + [0] * padding]
        for name, expected in zip(
            ("token_ids", "positions", "slot_mapping", "last_tokens"), columns, strict=True
        ):
            assert getattr(inputs, name).tolist() == expected, name
        assert inputs.seq_lens[: len(rows)].tolist() == lens
        assert inputs.last_known[: len(rows)].tolist() == [length - 1 for length in lens]
        assert inputs.valid[: len(rows)].tolist() == [1] * len(rows)
        self._compare_tables()

    def draft_step(self, layout: StepLayout, rows: Sequence[Row], queries: int) -> None:
        """Do the same for a step with drafts."""
        self._enter(rows)
        inputs = make_inputs(layout.rows, layout.rows * queries, queries)
        self._run(pack(layout, rows, queries), layout, inputs, queries)
        by_query: list[tuple[int, ...]] = []
        places: list[list[int]] = []
        by_row: list[tuple[int, ...]] = []
        for row in rows:
            end = self.expected["parameters"][row.slot][MAX_TOTAL]
            start = min(self._first(row), end)
            progress = self.expected["progress"][row.slot]
            count = max(1, min(1 + progress[NUM_DRAFTS], queries, end - start))
            token = row.token_ids[0] if row.token_ids[0] >= 0 else progress[LAST_SAMPLED]
            tokens = [token, *progress[DRAFTS : DRAFTS + count - 1], *[0] * (queries - count)]
            for query in range(queries):
                position = min(start + query, end - 1)
                lies = query < count and start < end
                places.append(self._places(row.slot, position) if lies else [-1] * GROUPS)
                by_query.append(
                    (
                        tokens[query],
                        position,
                        row.slot,
                        start + query + 1,
                        int(row.samples and query < count),
                    )
                )
            by_row.append((start + queries, start, count, min(start + count, end)))
            self._note(row.slot, start, row.token_ids[0] if start < end else -1)
        others = ("last_tokens", "slot_mapping")
        names = [f.name for f in fields(inputs) if f.name not in others]
        names = [*names[:2], *names[-3:], *names[2:-3]]
        for name, expected in zip(
            names, [*zip(*by_query, strict=True), *zip(*by_row, strict=True)], strict=True
        ):
            assert getattr(inputs, name)[: len(expected)].tolist() == list(expected), name
        padding = (layout.rows - len(rows)) * queries
        places += [[-1] * GROUPS] * padding
        assert inputs.slot_mapping.T.tolist() == places
        self._compare_tables()

    def _run(self, message: Tensor, layout: StepLayout, inputs: StepInputs, queries: int) -> None:
        with unchanged(message=message):
            prepare_step(message, layout, self.tables, inputs, self.page, queries)
        assert_margins_untouched(message, *(getattr(inputs, f.name) for f in fields(inputs)))

    def _compare_tables(self) -> None:
        for name in TABLES:
            table = getattr(self.tables, name)
            assert table.tolist() == self.expected[name], name
            width = table.shape[-1]
            if width and not table.is_contiguous():
                whole = table.as_strided((*table.shape[:-1], table.stride(-2)), table.stride())
                assert_untouched(whole[..., width:], f"what lies between two {name}")

    def set_progress(self, slot: int, values: Sequence[int]) -> None:
        """Set the first values of a slot's progress, as the kernels that sample do."""
        self.tables.progress[slot, : len(values)] = int32(list(values))
        self.expected["progress"][slot][: len(values)] = values


def make_inputs(rows: int, tokens: int, queries: int) -> StepInputs:
    sizes = [(tokens,)] * 2 + [(GROUPS, tokens)] + [(rows,)] * 5 + [(rows * queries,)] * 3
    return StepInputs(*(poisoned(*size, dtype=torch.int32) for size in sizes))


def model(slots: int = 6, width: int = 20, page: int = 16, longest: int = 0) -> Model:
    return Model(fresh_tables(slots, width, longest), page)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed: int) -> None:
    """Let requests enter, compute prompts in chunks, decode with ids on the device, and leave.

    Steps in which all rows decode may verify drafts.
    """
    chance = random.Random(seed)
    page, slots, width = chance.choice([(1, 5, 90), (4, 7, 25), (16, 6, 8)])
    state = model(slots, width, page, longest=70)
    layout = StepLayout(rows=4, tokens=26)
    lengths = [0] * slots  # number of tokens of the request in a slot; 0 for a free slot
    prompts = [0] * slots
    held = [0] * slots
    for _ in range(20):
        rows, free_tokens = [], layout.tokens
        decodes = chance.random() < 0.5
        for slot in chance.sample(range(slots), chance.randint(0, layout.rows)):
            enters = lengths[slot] == 0
            if decodes and (enters or lengths[slot] < prompts[slot]):
                continue
            if enters:
                prompts[slot] = chance.randint(1, 40)
            in_prompt = lengths[slot] < prompts[slot]
            count = min(
                chance.randint(1, 12) if in_prompt else 1,
                free_tokens,
                width * page - MOST_DRAFTS - lengths[slot],
            )
            if in_prompt:
                count = min(count, prompts[slot] - lengths[slot])
            if count <= 0:
                continue
            free_tokens -= count
            lengths[slot] += count
            needed = -(-(lengths[slot] + MOST_DRAFTS) // page)
            # Blocks may come ahead of the tokens, as those of a whole prompt do.
            blocks = min(max(needed - held[slot], 0) + chance.choice([0, 0, 2]), width - held[slot])
            rows.append(
                Row(
                    slot,
                    lengths[slot],
                    [chance.randint(0, 150_000) if in_prompt else -1] * count,
                    held[slot],
                    [chance.randint(0, 1000) for _ in range(blocks)],
                    record(width * page, chance.randrange(99)) if enters else None,
                    start_known=in_prompt,
                )
            )
            held[slot] += blocks
        if decodes and rows:
            state.draft_step(layout, rows, chance.randint(2, 1 + MOST_DRAFTS))
        else:
            state.step(layout, rows)
        for row in rows:
            drafts = [chance.randint(0, 150_000) for _ in range(chance.randint(0, MOST_DRAFTS))]
            sampled = chance.randint(0, 150_000)
            state.set_progress(row.slot, [lengths[row.slot], sampled, len(drafts), *drafts])
            if chance.random() < 0.15:  # the request leaves
                lengths[row.slot] = held[row.slot] = 0


def test_a_record_is_kept_word_by_word() -> None:
    for seed in range(5):
        model().step(StepLayout(1, 1), [Row(3, 1, [5], 0, [7], record(seed=seed))])


@pytest.mark.parametrize("start", [5, 6, 7, 8, 9, 11])
def test_nothing_lies_behind_the_end_of_a_request(start: int) -> None:
    """A request of 8 tokens: its drafts, and then its row, lie behind the end."""
    state, layout = model(3, 2, page=4, longest=8), StepLayout(2, 2)
    state.step(layout, [Row(1, 2, [4, 5], 0, [6, 3], record(max_total=8))])
    state.set_progress(1, [start, 9, 3, 11, 12, 13])
    state.draft_step(layout, [Row(1, 0, [-1], 2, start_known=False)], 4)


def test_a_request_enters_without_the_drafts_of_the_one_before() -> None:
    state, layout = model(page=4, longest=9), StepLayout(3, 3)
    state.set_progress(2, [5, 9, 4, 1, 2, 3, 4])
    state.draft_step(layout, [Row(2, 6, [7], 0, [1, 2], record())], 3)


def test_known_and_unknown_ids_side_by_side() -> None:
    state = model(page=4)
    state.step(
        StepLayout(2, 8),
        [
            Row(1, 3, [10, 11, 12], 0, [5], record()),
            Row(4, 5, [20, 21, 22, 23, 24], 0, [6, 9], record()),
        ],
    )
    state.set_progress(1, [3, 77, 0])
    state.set_progress(4, [5, 88, 0])
    state.step(
        StepLayout(2, 8), [Row(4, 6, [-1], 2, start_known=False), Row(1, 6, [-1, 13, -1], 1, [3])]
    )


def test_token_id_zero_is_known() -> None:
    state = model()
    state.set_progress(0, [0, 42])
    state.step(StepLayout(1, 2), [Row(0, 2, [0, 0], 0, [1], record())])


def test_more_tokens_and_more_blocks_than_one_turn_of_the_kernel() -> None:
    """Put a prompt of several hundred tokens in blocks of one behind another row.

    Padding follows.
    """
    state, blocks = model(3, 1400, page=1), random.Random(0).sample(range(5000), 1300)
    layout = StepLayout(3, 900)
    state.step(
        layout,
        [
            Row(1, 1, [3], 0, blocks[:1], record()),
            Row(2, 600, list(range(600)), 0, blocks[1:700], record()),
        ],
    )
    state.step(layout, [Row(2, 1200, list(range(600)), 699, blocks[700:1290])])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 2), (5, 5), (8, 300)])
def test_steps_without_rows_and_with_one_are_padded(rows: int, tokens: int) -> None:
    state = model()
    state.step(StepLayout(rows, tokens), [])
    state.step(StepLayout(rows, tokens), [Row(5, 1, [9], 0, [4], record())])


@pytest.mark.parametrize("room", [(2, 7), (3, 7), (2, 8), (5, 39), (6, 40)])
def test_outputs_may_be_made_for_fewer_rows_and_tokens_than_the_message(
    room: tuple[int, int],
) -> None:
    """Make outputs for fewer rows and tokens, as a captured graph does."""
    rows = [
        Row(4, 1, [8], 0, [1], record()),
        Row(0, 6, [1, 2, 3, 4, 5, 6], 0, [2, 3], record()),
    ]
    model(page=4).step(StepLayout(6, 40), rows, room)


def test_full_steps_have_no_padding() -> None:
    rows = [Row(slot, 2, [slot, -1], 0, [slot], record(seed=slot)) for slot in range(5)]
    model().step(StepLayout(5, 10), rows)


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 1), (2, 7), (3, 3), (4, 16), (7, 512), (255, 8192), (256, 256)]
)
def test_columns_are_aligned_and_do_not_overlap(rows: int, tokens: int) -> None:
    layout = StepLayout(rows, tokens)
    spans = [(0, HEADER)]
    spans += [(layout.at(name), layout.at(name) + rows + 1) for name in ROW_COLUMNS]
    spans += [(layout.token_ids, layout.token_ids + tokens), (layout.block_ids, layout.block_ids)]
    assert all(begin % 4 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert layout.block_ids - HEADER < (rows + 4) * len(ROW_COLUMNS) + tokens + 4, (
        "no more room than that"
    )
