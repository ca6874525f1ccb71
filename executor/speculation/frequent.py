"""Drafts by frequency: what followed most often in a request's own tokens, with numpy.

The idea is that of suffix decoding (Oliaro et al. 2024), which counts in a tree of many requests'
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sidestep.executor.speculation.ngram import check_range
from sidestep.executor.speculation.proposer import Proposer, ProposerSettings
from sidestep.ipc.transport.step import Int32


def most_frequent_follower(
    tokens: Int32, drafts: Sequence[int], min_match: int, max_match: int
) -> int | None:
    """Return the token that follows a row's tokens [n] and its drafts most often; None if none.

    Only places in `tokens` count where the longest match ends, and ties go to the latest of them.
    """
    known = [*tokens[-max_match:].tolist(), *drafts]
    places: np.ndarray[tuple[int], np.dtype[np.intp]] = np.flatnonzero(tokens[:-1] == known[-1])
    longest, matched = places, 0
    while len(places):
        longest, matched = places, matched + 1
        if matched == min(max_match, len(known)):
            break
        places = places[places >= matched]
        places = places[tokens[places - matched] == known[-1 - matched]]
    if matched < min_match:
        return None
    followers = tokens[longest[::-1] + 1]
    # The first of equal counts is the one with the latest place.
    values, first, counts = np.unique(followers, return_index=True, return_counts=True)
    return int(values[np.lexsort((first, -counts))[0]])


class FrequentProposer(Proposer):
    """Proposes, token by token, what followed the longest match of the last tokens most often."""

    def __init__(self, settings: ProposerSettings) -> None:
        check_range(settings)
        self._min_match, self._max_match = settings.min_match, settings.max_match

    def __repr__(self) -> str:
        return f"FrequentProposer(matches of {self._min_match} to {self._max_match} tokens)"

    def begin(self, slot: int, tokens: Int32) -> None:
        """Do nothing, since nothing is kept by slot."""

    def propose(self, slot: int, tokens: Int32, num: int) -> Int32:
        """Return at most `num` drafts."""
        drafts = list[int]()
        while len(drafts) < num:
            found = most_frequent_follower(tokens, drafts, self._min_match, self._max_match)
            if found is None:
                break
            drafts.append(found)
        return np.array(drafts, np.int32)
