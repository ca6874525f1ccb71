"""The kernel that accepts drafts, against its reference and in cases that readers know."""

from __future__ import annotations

import random
from dataclasses import fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.kernels.ops import speculation
from sidestep.kernels.ops.speculation import AcceptedTokens, DraftTables
from sidestep.kernels.speculation.accept_triton import accept
from tests.triton.speculation.tables import (
    Sizes,
    assert_equal_tables,
    column,
    copied,
    random_tables,
    spaced,
)
from tests.triton.support import assert_margins_untouched, int32, poisoned

ODD = 10**9
"""Number in columns of padding, which would be a fault as a slot."""


def outputs(rows: int, width: int) -> AcceptedTokens:
    return AcceptedTokens(
        *(poisoned(3, count, dtype=torch.int32) for count in (rows * width, rows, rows, rows, rows))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.builds(Sizes, st.integers(1, 6), st.integers(1, 5), st.integers(1, 30)),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_the_kernel_does_what_the_reference_does(
    sizes: Sizes, letters: int, chance: random.Random
) -> None:
    tables = random_tables(sizes, letters, chance)
    rows, padding = chance.randint(1, sizes.slots), chance.randint(0, 2)
    width = chance.randint(1, sizes.limit + 1)  # fewer, if the step verifies fewer than there are
    slots = chance.sample(range(sizes.slots), rows)
    held = tables.num_drafts.tolist()
    valid = [1 + chance.randint(0, min(held[slot], width - 1)) for slot in slots]
    starts = tables.num_computed[torch.tensor(slots, dtype=torch.long)].tolist()
    marks = [chance.choice([0, 1, 1, -1]) for _ in slots]
    sampled = column([chance.randrange(letters) for _ in range((rows + padding) * width)])
    columns = {
        name: column(values + [ODD] * padding)
        for name, values in {
            "valid": valid,
            "slots": slots,
            "starts": starts,
            "marks": marks,
        }.items()
    }
    out, wanted = outputs(rows + padding, width), outputs(rows + padding, width)
    for field in fields(out):
        getattr(wanted, field.name).copy_(getattr(out, field.name))
    expected = copied(tables)
    speculation.accept(
        sampled[: rows * width],
        **{name: values[:rows] for name, values in columns.items()},
        tables=expected,
        out=wanted,
        out_row=1,
    )
    header = int32([rows, 1])
    accept(sampled, header=header, **columns, tables=tables, out=out)
    assert_equal_tables(tables, expected)
    for field in fields(out):
        found = getattr(out, field.name)
        assert found.tolist() == getattr(wanted, field.name).tolist(), field.name
        assert_margins_untouched(found)


def one_slot(drafts: list[int], longest: int = 10) -> DraftTables:
    return DraftTables(
        last_sampled=column([5]),
        num_computed=column([3]),
        drafts=spaced([drafts + [99] * (4 - len(drafts))]),
        num_drafts=column([len(drafts)]),
        tokens=spaced([[1, 2, 3, 5] + [0] * (longest - 4)]),
        draft_limit=column([4]),
        max_total=column([longest]),
    )


def accepted(tables: DraftTables, sampled: list[int], valid: int) -> tuple[list[int], int, int]:
    """Return the new tokens of a row of one slot, its verified drafts and its hits."""
    out = outputs(1, len(sampled))
    accept(
        column(sampled),
        header=int32([1, 2]),
        valid=int32([valid]),
        slots=int32([0]),
        starts=tables.num_computed.clone(),
        marks=int32([1]),
        tables=tables,
        out=out,
    )
    size = int(out.sizes[2, 0])
    assert int(tables.last_sampled[0]) == int(out.ids[2, size - 1])
    assert int(tables.num_computed[0]) == 3 + size
    assert int(tables.num_drafts[0]) == 0
    return out.ids[2, :size].tolist(), int(out.drafts[2, 0]), int(out.hits[2, 0])


def test_tokens_up_to_the_first_wrong_draft_count() -> None:
    tables = one_slot([6, 7, 8])
    assert accepted(tables, [6, 7, 9, 10], 4) == ([6, 7, 9], 3, 2)
    assert tables.tokens[0].tolist() == [1, 2, 3, 5, 6, 7, 9, 0, 0, 0]


def test_all_drafts_are_right_and_one_more_token_comes() -> None:
    assert accepted(one_slot([6, 7, 8]), [6, 7, 8, 9], 4) == ([6, 7, 8, 9], 3, 3)


def test_a_right_draft_behind_a_wrong_one_does_not_count() -> None:
    assert accepted(one_slot([6, 7, 8]), [1, 7, 8, 9], 4) == ([1], 3, 0)


def test_a_step_without_drafts_tells_whether_the_first_one_was_right() -> None:
    assert accepted(one_slot([6, 7]), [6], 1) == ([6], 0, 1)
    assert accepted(one_slot([6, 7]), [7], 1) == ([7], 0, 0)
    assert accepted(one_slot([]), [99], 1) == ([99], 0, 0)


def test_the_drafts_that_a_slot_had_are_told() -> None:
    out = outputs(1, 1)
    one = int32([1])
    accept(
        column([6]),
        header=int32([1, 0]),
        valid=one,
        slots=int32([0]),
        starts=int32([3]),
        marks=one,
        tables=one_slot([6, 7, 8]),
        out=out,
    )
    assert (int(out.drafts[0, 0]), int(out.held[0, 0])) == (0, 3)


def test_a_smaller_step_compares_one_draft_behind_its_own() -> None:
    assert accepted(one_slot([6, 7, 8]), [6, 7], 2) == ([6, 7], 1, 2)
    assert accepted(one_slot([6, 7, 8]), [1, 7], 2) == ([1], 1, 0)


def test_tokens_behind_the_end_of_the_table_are_not_stored() -> None:
    tables = one_slot([6, 7, 8], longest=6)
    assert accepted(tables, [6, 7, 8, 9], 4) == ([6, 7, 8, 9], 3, 3)
    assert_equal_tables(tables, copied(tables))
    assert tables.tokens[0].tolist() == [1, 2, 3, 5, 6, 7]
