"""The kernel that unpacks a step, over random sequences of steps, against plain Python tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.kernels.triton.prepare_step_triton import (
    HEADER,
    MASKED,
    ROW_COLUMNS,
    SAMPLING,
    SlotTables,
    StepLayout,
    prepare_step,
)
from tests.triton.support import (
    DEVICE,
    assert_margins_untouched,
    assert_untouched,
    bits,
    guarded,
    poisoned,
    unchanged,
)

ODD = -1234567
"""Number that fills the unused parts of the message."""
SEEDS = [
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**32,
    -(2**32),
    2**63 - 1,
    -(2**63),
    0x123456789ABCDEF,
    -0x7EDCBA9876543211,
]
FLOATS = [0.0, -0.0, 1.0, 0.7, 1e-45, 3.4e38, float("inf"), 1.1754944e-38]
NAMES = ("temperature", "top_p", "min_p", "top_k", "seed")


@dataclass(frozen=True)
class Parameters:
    """Parameters of a request that enters."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0


@dataclass
class Row:
    """One request in one step. held: number of blocks that its table has already."""

    slot: int
    seq_len: int
    token_ids: Sequence[int]
    held: int = 0
    new_blocks: Sequence[int] = ()
    enters: Parameters | None = None


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def starts(counts: Sequence[int]) -> list[int]:
    sums: list[int] = np.cumsum([0, *counts]).tolist()
    return sums


def pack(layout: StepLayout, rows: Sequence[Row]) -> Tensor:
    """Return the message that StepLayout and prepare_step describe.

    Its unused parts hold an odd number.
    """
    block_ids = [block for row in rows for block in row.new_blocks]
    token_ids = [token for row in rows for token in row.token_ids]
    parameters = [row.enters or Parameters(9.5, 9.5, 9.5, 99, -99) for row in rows]
    seeds = [p.seed % 2**64 for p in parameters]
    columns = {
        "slots": [row.slot for row in rows],
        "seq_lens": [row.seq_len for row in rows],
        "query_starts": starts([len(row.token_ids) for row in rows]),
        "samples": [1 for _ in rows],
        "num_blocks": [row.held for row in rows],
        "block_starts": starts([len(row.new_blocks) for row in rows]),
        "enters": [int(row.enters is not None) for row in rows],
        "temperature": [float_bits(p.temperature) for p in parameters],
        "top_p": [float_bits(p.top_p) for p in parameters],
        "min_p": [float_bits(p.min_p) for p in parameters],
        "top_k": [p.top_k for p in parameters],
        "seed_low": [seed % 2**32 for seed in seeds],
        "seed_high": [seed >> 32 for seed in seeds],
    }
    assert columns.keys() == set(ROW_COLUMNS)
    message = np.full(layout.block_ids + len(block_ids) + 5, ODD, np.int32)
    for name, column in columns.items():
        message[layout.at(name) : layout.at(name) + len(column)] = np.array(
            column, np.int64
        ).astype(np.int32)
    message[layout.token_ids : layout.token_ids + len(token_ids)] = token_ids
    message[layout.block_ids : layout.block_ids + len(block_ids)] = block_ids
    message[:3] = len(rows), sum(len(row.token_ids) == 1 for row in rows), len(token_ids)
    message[MASKED], message[SAMPLING] = 0, len(rows)
    return guarded(torch.from_numpy(message).to(DEVICE))


def fresh_tables(slots: int, width: int) -> SlotTables:
    f32, i32 = torch.float32, torch.int32
    # A table's rows lie further apart than they are long.
    blocks = poisoned(slots, width + 3, dtype=i32)[:, :width]
    return SlotTables(
        blocks,
        poisoned(slots, dtype=i32),
        poisoned(slots, dtype=f32),
        poisoned(slots, dtype=f32),
        poisoned(slots, dtype=f32),
        poisoned(slots, dtype=i32),
        poisoned(slots, dtype=torch.int64),
    )


@dataclass
class Model:
    """The device tables together with their expected contents, as lists of integers.

    Floats are compared by their bits.
    """

    tables: SlotTables
    page: int
    expected: dict[str, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.expected = {name: bits(getattr(self.tables, name)).tolist() for name in self._names()}

    @staticmethod
    def _names() -> tuple[str, ...]:
        return ("block_tables", "last_sampled", *NAMES)

    def _layout_tokens(self, rows: Sequence[Row], tokens: int) -> list[list[int]]:
        """Return token_ids, positions and slot mapping."""
        out = []
        for row in rows:
            for i, token in enumerate(row.token_ids):
                position = row.seq_len - len(row.token_ids) + i
                block = self.expected["block_tables"][row.slot][position // self.page]
                known = token if token >= 0 else self.expected["last_sampled"][row.slot]
                out.append((known, position, block * self.page + position % self.page))
        out += [(0, 0, -1)] * (tokens - len(out))
        return [list(column) for column in zip(*out, strict=True)]

    def step(
        self, layout: StepLayout, rows: Sequence[Row], room: tuple[int, int] | None = None
    ) -> None:
        """Run the kernel and this model, and compare all memory that either has written.

        room: rows and tokens that the step's outputs are made for, if less than the message may
        hold.
        """
        num_rows, num_tokens = room or (layout.rows, layout.tokens)
        for row in rows:
            table = self.expected["block_tables"][row.slot]
            table[row.held : row.held + len(row.new_blocks)] = row.new_blocks
            if row.enters is not None:
                for name in NAMES:
                    value = getattr(row.enters, name)
                    self.expected[name][row.slot] = (
                        float_bits(value) if isinstance(value, float) else value
                    )
        message = pack(layout, rows)
        outputs = [
            poisoned(size, dtype=torch.int32)
            for size in (num_tokens, num_tokens, num_tokens, num_rows)
        ]
        ids, positions, offsets, ends = outputs
        with unchanged(message=message):
            prepare_step(message, layout, self.tables, ids, positions, offsets, ends, self.page)
        for name in self._names():
            assert bits(getattr(self.tables, name)).tolist() == self.expected[name], name
        last_tokens = [end - 1 for end in starts([len(row.token_ids) for row in rows])[1:]]
        expected_outputs = [
            *self._layout_tokens(rows, num_tokens),
            last_tokens + [0] * (num_rows - len(rows)),
        ]
        for name, got, expected in zip(
            ("token_ids", "positions", "slot_mapping", "last_tokens"),
            outputs,
            expected_outputs,
            strict=True,
        ):
            assert got.tolist() == expected, name
        assert_margins_untouched(
            message, *outputs, *(getattr(self.tables, name) for name in self._names()[1:])
        )
        whole = self.tables.block_tables.as_strided(
            (len(self.expected["last_sampled"]), self.tables.block_tables.stride(0)),
            self.tables.block_tables.stride(),
        )
        assert_untouched(
            whole[:, self.tables.block_tables.shape[1] :], "what lies between two tables"
        )

    def sample(self, slot: int, token: int) -> None:
        self.tables.last_sampled[slot] = token
        self.expected["last_sampled"][slot] = token


def model(slots: int = 6, width: int = 20, page: int = 16) -> Model:
    return Model(fresh_tables(slots, width), page)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed: int) -> None:
    """Let requests enter, compute prompts in chunks, decode with ids on the device, and leave."""
    chance = random.Random(seed)
    page, slots, width = chance.choice([(1, 5, 90), (4, 7, 25), (16, 6, 8)])
    state = model(slots, width, page)
    layout = StepLayout(rows=4, tokens=26)
    lengths = [0] * slots  # number of tokens of the request in a slot; 0 for a free slot
    prompts = [0] * slots
    held = [0] * slots
    for _ in range(14):
        rows, free_tokens = [], layout.tokens
        for slot in chance.sample(range(slots), chance.randint(0, layout.rows)):
            enters = lengths[slot] == 0
            if enters:
                prompts[slot] = chance.randint(1, 40)
            in_prompt = lengths[slot] < prompts[slot]
            count = min(
                chance.randint(1, 12) if in_prompt else 1, free_tokens, width * page - lengths[slot]
            )
            if in_prompt:
                count = min(count, prompts[slot] - lengths[slot])
            if not count:
                continue
            free_tokens -= count
            lengths[slot] += count
            needed = -(-lengths[slot] // page)
            # Blocks may come ahead of the tokens, as those of a whole prompt do.
            blocks = min(max(needed - held[slot], 0) + chance.choice([0, 0, 2]), width - held[slot])
            parameters = Parameters(
                chance.choice(FLOATS),
                chance.choice(FLOATS),
                chance.choice(FLOATS),
                chance.randint(0, 99),
                chance.choice(SEEDS),
            )
            rows.append(
                Row(
                    slot,
                    lengths[slot],
                    [chance.randint(0, 150_000) if in_prompt else -1] * count,
                    held[slot],
                    [chance.randint(0, 1000) for _ in range(blocks)],
                    parameters if enters else None,
                )
            )
            held[slot] += blocks
        state.step(layout, rows)
        for row in rows:
            state.sample(row.slot, chance.randint(0, 150_000))
            if chance.random() < 0.15:  # the request leaves
                lengths[row.slot] = held[row.slot] = 0


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_keep_all_64_bits(seed: int) -> None:
    model().step(StepLayout(1, 1), [Row(3, 1, [5], 0, [7], Parameters(seed=seed))])


def test_known_and_unknown_ids_side_by_side() -> None:
    state = model(page=4)
    state.step(
        StepLayout(2, 8),
        [
            Row(1, 3, [10, 11, 12], 0, [5], Parameters()),
            Row(4, 5, [20, 21, 22, 23, 24], 0, [6, 9], Parameters()),
        ],
    )
    state.sample(1, 77)
    state.sample(4, 88)
    state.step(StepLayout(2, 8), [Row(4, 6, [-1], 2), Row(1, 6, [-1, 13, -1], 1, [3])])


def test_token_id_zero_is_known() -> None:
    state = model()
    state.sample(0, 42)
    state.step(StepLayout(1, 2), [Row(0, 2, [0, 0], 0, [1], Parameters())])


def test_more_tokens_and_more_blocks_than_one_turn_of_the_kernel() -> None:
    """Put a prompt of several hundred tokens in blocks of one behind another row.

    Padding follows.
    """
    state, blocks = model(3, 1400, page=1), random.Random(0).sample(range(5000), 1300)
    layout = StepLayout(3, 900)
    state.step(
        layout,
        [
            Row(1, 1, [3], 0, blocks[:1], Parameters()),
            Row(2, 600, list(range(600)), 0, blocks[1:700], Parameters()),
        ],
    )
    state.step(layout, [Row(2, 1200, list(range(600)), 699, blocks[700:1290])])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 2), (5, 5), (8, 300)])
def test_steps_without_rows_and_with_one_are_padded(rows: int, tokens: int) -> None:
    state = model()
    state.step(StepLayout(rows, tokens), [])
    state.step(StepLayout(rows, tokens), [Row(5, 1, [9], 0, [4], Parameters())])


@pytest.mark.parametrize("room", [(2, 7), (3, 7), (2, 8), (5, 39), (6, 40)])
def test_outputs_may_be_made_for_fewer_rows_and_tokens_than_the_message(
    room: tuple[int, int],
) -> None:
    """Make outputs for fewer rows and tokens, as a captured graph does."""
    rows = [
        Row(4, 1, [8], 0, [1], Parameters()),
        Row(0, 6, [1, 2, 3, 4, 5, 6], 0, [2, 3], Parameters()),
    ]
    model(page=4).step(StepLayout(6, 40), rows, room)


def test_full_steps_have_no_padding() -> None:
    rows = [Row(slot, 2, [slot, -1], 0, [slot], Parameters(seed=-slot)) for slot in range(5)]
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
