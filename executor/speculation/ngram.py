"""Look-up of drafts in a request's own tokens (prompt look-up; Saxena 2023), with numpy."""

from __future__ import annotations

import numpy as np

from sidestep.executor.speculation.proposer import Proposer, ProposerSettings
from sidestep.ipc.transport.step import Int32


def find_drafts_np(tokens: Int32, min_match: int, max_match: int, num_drafts: int) -> Int32:
    """Return drafts behind all of a row's tokens [n]: `num_drafts` of them, or none.

    They are those of kernels.ops.speculation.find_drafts. The time is one comparison of all tokens
    with the last one, and a little for each place that is left.
    """
    length = len(tokens)
    none = np.empty(0, np.int32)
    if length < 2 or num_drafts < 1:
        return none
    places: np.ndarray[tuple[int], np.dtype[np.intp]] = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 0
    latest = -1
    while len(places):
        matched, latest = matched + 1, int(places[-1])
        if matched == max_match:
            break
        # Only the first place can be too near to the row's start: places differ, and those that
        # were left before begin no earlier.
        if places[0] < matched:
            places = places[1:]
        places = places[tokens[places - matched] == tokens[length - 1 - matched]]
    if matched < min_match:
        return none
    followers = tokens[latest + 1 : latest + 1 + num_drafts]
    # np.resize repeats them: behind the known tokens the drafts continue themselves.
    return np.resize(followers, num_drafts).astype(np.int32, copy=False)


def check_range(settings: ProposerSettings) -> None:
    """Raise ValueError if no match can be as long as the settings ask for."""
    if not 1 <= settings.min_match <= settings.max_match:
        raise ValueError(
            f"matches of {settings.min_match} to {settings.max_match} tokens are no range"
        )


class NgramProposer(Proposer):
    """Proposes what followed the longest earlier match of the last tokens."""

    def __init__(self, settings: ProposerSettings) -> None:
        check_range(settings)
        self._min_match, self._max_match = settings.min_match, settings.max_match

    def __repr__(self) -> str:
        return f"NgramProposer(matches of {self._min_match} to {self._max_match} tokens)"

    def begin(self, slot: int, tokens: Int32) -> None:
        """Do nothing, since nothing is kept by slot."""

    def propose(self, slot: int, tokens: Int32, num: int) -> Int32:
        """Return drafts, `num` or none."""
        return find_drafts_np(tokens, self._min_match, self._max_match, num)
