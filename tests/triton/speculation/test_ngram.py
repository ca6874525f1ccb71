"""The kernels that look up drafts, against their reference."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sidestep.kernels.ops import speculation
from sidestep.kernels.ops.speculation import DraftTables
from sidestep.kernels.speculation import ngram_triton
from sidestep.kernels.speculation.ngram_triton import look_up_drafts
from tests.triton.speculation.tables import (
    Sizes,
    assert_equal_tables,
    column,
    copied,
    random_tables,
    spaced,
)
from tests.triton.support import DEVICE, assert_margins_untouched, int32, poisoned

ODD = 10**9
"""Number in columns of padding, which would be a fault as a slot."""


def scratch_of(slots: int) -> Tensor:
    return poisoned(slots, dtype=torch.int64).zero_()


def check(
    tables: DraftTables, slots: list[int], marks: list[int], matches: tuple[int, int]
) -> None:
    """Run the kernels, with padding behind the rows, and the reference, and compare everything."""
    expected, scratch = copied(tables), scratch_of(len(tables.num_drafts))
    speculation.look_up_drafts(column(slots), column(marks), expected, *matches)
    look_up_drafts(
        header=int32([len(slots), ODD]),
        slots=column([*slots, ODD]),
        marks=column([*marks, ODD]),
        tables=tables,
        scratch=scratch,
        min_match=matches[0],
        max_match=matches[1],
    )
    assert_equal_tables(tables, expected)
    assert scratch.tolist() == [0] * len(scratch), "the scratch is zero again"
    assert_margins_untouched(scratch)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(Sizes, st.integers(1, 5), st.integers(1, 5), st.integers(1, 40)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_the_kernels_do_what_the_reference_does(
    sizes: Sizes, letters: int, min_match: int, more: int, chance: random.Random
) -> None:
    tables = random_tables(sizes, letters, chance)
    slots = chance.sample(range(sizes.slots), chance.randint(1, sizes.slots))
    marks = [chance.choice([0, 1, 1, 2]) for _ in slots]
    check(tables, slots, marks, (min_match, min_match + more))


def long_table(tokens: list[int], longest: int, limit: int = 4) -> DraftTables:
    """Return the tables of one slot, which may have as many drafts as there is room."""
    return DraftTables(
        last_sampled=column([tokens[-1]]),
        num_computed=column([len(tokens) - 1]),
        drafts=spaced([[99] * limit]),
        num_drafts=column([0]),
        tokens=spaced([tokens + [0] * (longest - len(tokens))]),
        draft_limit=column([limit]),
        max_total=column([longest]),
    )


@pytest.mark.parametrize("place", [0, 1020, 1022, 1023, 1024, 2046, 4000, 4990])
def test_matches_lie_in_any_tile_and_across_two(place: int) -> None:
    tokens = list(range(100, 5100))
    tokens[place : place + 3] = [1, 2, 3]
    tokens[-3:] = [1, 2, 3]
    tables = long_table(tokens, 6000)
    check(tables, [0], [1], (2, 5))
    assert tables.drafts[0].tolist() == tokens[place + 3 : place + 7]


def test_a_program_takes_several_tiles_where_there_are_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram_triton, "_num_programs", lambda rows, longest: 2)
    chance = random.Random(0)
    tokens = [chance.randrange(40) for _ in range(5500)]
    check(long_table(tokens, 6000), [0], [1], (2, 6))


@pytest.mark.parametrize(
    ("rows", "longest", "programs"),
    [(1, 1, 1), (1, 40_960, 40), (1, 131_072, 64), (64, 40_960, 32), (256, 40_960, 8)],
)
def test_the_grid_stays_small(rows: int, longest: int, programs: int) -> None:
    assert ngram_triton._num_programs(rows, longest) == programs


def test_the_rest_of_a_request_limits_its_drafts() -> None:
    tokens = [1, 2, 3] * 4
    for left in range(-1, 6):
        tables = long_table(tokens, 30)
        tables.max_total.fill_(len(tokens) + left)
        check(tables, [0], [1], (2, 4))
        assert int(tables.num_drafts[0]) == max(0, min(left, 4))


def test_a_request_longer_than_the_table_has_no_drafts() -> None:
    tables = long_table([1, 2, 3] * 4, 12)
    tables.num_computed.fill_(12)
    tables.max_total.fill_(100)
    check(tables, [0], [1], (2, 4))
    assert int(tables.num_drafts[0]) == 0


def test_the_next_step_finds_its_own_drafts() -> None:
    """Extend a request token by token with the same scratch; no earlier match stays."""
    tables, scratch = long_table([1, 2, 3, 1, 2], 30), scratch_of(1)
    found = []
    for token in (3, 9, 1, 2):
        length = int(tables.num_computed[0]) + 1
        tables.tokens[0, length] = token
        tables.num_computed.add_(1)
        look_up_drafts(
            header=int32([1, 0]),
            slots=int32([0]),
            marks=int32([1]),
            tables=tables,
            scratch=scratch,
            min_match=2,
            max_match=4,
        )
        found.append(tables.drafts[0, : int(tables.num_drafts[0])].tolist())
    assert found == [[1, 2, 3, 1], [], [], [3, 9, 1, 2]]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only a GPU captures graphs")
def test_a_captured_graph_follows_the_tables() -> None:
    tables, scratch = long_table([1, 2, 3, 1, 2], 30), scratch_of(1)
    header, slots, marks = int32([1, 0]), int32([0]), int32([1])

    def run() -> None:
        look_up_drafts(
            header=header,
            slots=slots,
            marks=marks,
            tables=tables,
            scratch=scratch,
            min_match=2,
            max_match=4,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    tables.tokens[0, 5] = 3
    tables.tokens[0, 6] = 1
    tables.num_computed.fill_(6)
    graph.replay()
    torch.cuda.synchronize()
    assert tables.drafts[0].tolist() == [2, 3, 1, 2]
    header[0] = 0
    tables.num_drafts.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert tables.num_drafts.tolist() == [7]
