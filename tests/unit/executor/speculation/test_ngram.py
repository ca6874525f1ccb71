"""Look-up of drafts, with numpy and with torch, against the definition in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sidestep.executor.speculation.ngram import find_drafts_np
from sidestep.kernels.ops.speculation import find_drafts
from tests.unit.executor.speculation.lookups import plain_lookup, token_rows

ranges = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda r: (r[0], r[0] + r[1]))


@given(token_rows, ranges, st.integers(0, 6))
def test_numpy_finds_the_drafts_of_the_definition(
    tokens: list[int], matches: tuple[int, int], num: int
) -> None:
    found = find_drafts_np(np.array(tokens, np.int32), *matches, num)
    assert found.dtype == np.int32
    assert found.tolist() == plain_lookup(tokens, *matches, num)


@given(st.lists(token_rows, min_size=1, max_size=4), ranges, st.integers(1, 6))
def test_torch_finds_the_drafts_of_the_definition(
    rows: list[list[int]], matches: tuple[int, int], num: int
) -> None:
    longest = max(map(len, rows)) + 1
    # The tokens behind a row's known tokens would match.
    tokens = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in rows])
    drafts, counts = find_drafts(
        tokens.int(), torch.tensor([len(row) for row in rows]).int(), *matches, num
    )
    found = [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]
    assert found == [plain_lookup(row, *matches, num) for row in rows]


def drafts(*tokens: int, min_match: int = 2, max_match: int = 4, num: int = 3) -> list[int]:
    found: list[int] = find_drafts_np(
        np.array(tokens, np.int32), min_match, max_match, num
    ).tolist()
    return found


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert drafts(1, 2, 3, 70, 71, 72, 2, 3, 80, 81, 82, 1, 2, 3) == [70, 71, 72]


def test_the_latest_of_equally_long_matches_wins() -> None:
    assert drafts(1, 2, 70, 71, 72, 1, 2, 80, 81, 82, 1, 2) == [80, 81, 82]


def test_matches_longer_than_the_longest_count_as_that_long() -> None:
    far = [1, 2, 3, 70, 71, 72]
    assert drafts(*far, 9, 2, 3, 80, 81, 82, 1, 2, 3, max_match=2) == [80, 81, 82]


@pytest.mark.parametrize("tokens", [(5,), (1, 2), (1, 2, 3, 4), (3, 9, 3), (2, 3, 9, 8, 3)])
def test_a_row_without_a_match_has_no_drafts(tokens: tuple[int, ...]) -> None:
    assert drafts(*tokens) == []


def test_periodic_text_goes_on_past_the_known_tokens() -> None:
    assert drafts(1, 2, 3, 1, 2, 3, 1, 2, num=8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert drafts(7, 7, 7, num=4) == [7, 7, 7, 7]


def test_a_row_of_tens_of_thousands_of_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 30_000, 40_000).astype(np.int32)
    tokens[-3:] = tokens[100:103]
    assert find_drafts_np(tokens, 3, 8, 5).tolist() == tokens[103:108].tolist()
