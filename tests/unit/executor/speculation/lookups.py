"""Plain Python versions of acceptance and look-up, for tests of the fast ones."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

token_rows = st.integers(1, 4).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=40)
)
"""Rows of tokens of a small alphabet, in which matches are frequent."""


def plain_frequent(tokens: Sequence[int], min_match: int, max_match: int, num: int) -> list[int]:
    """Return the most frequent followers of a row's tokens, by the definition."""
    known = list(tokens)
    for _ in range(num):
        for n in range(max_match, min_match - 1, -1):
            ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == known[-n:]]
            if ends:
                followers = [tokens[end] for end in ends]
                known.append(
                    max(
                        followers,
                        key=lambda token: (
                            followers.count(token),
                            len(followers) - followers[::-1].index(token),
                        ),
                    )
                )
                break
        else:
            break
    return known[len(tokens) :]


def plain_lookup(tokens: Sequence[int], min_match: int, max_match: int, num: int) -> list[int]:
    """Return the drafts behind a row's tokens, by the definition."""
    length = len(tokens)
    for n in range(max_match, min_match - 1, -1):
        for end in range(length - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[length - n :]:
                known = list(tokens)
                for i in range(num):
                    known.append(known[end + i])
                return known[length:]
    return []
