"""Drafts with a given acceptance rate, for tests and benchmarks of the machinery.

No trained drafter is needed, but something that knows the right tokens is: an oracle. Only a device
whose tokens follow from a script, as the fake device's, or from an earlier run of the same
requests can give one. A real model cannot. Without an oracle the drafts are pseudo-random tokens,
of which about one in vocab_size is accepted, so a rate above 0 is refused then.
"""

from __future__ import annotations

import numpy as np

from sidestep.executor.speculation.proposer import Proposer, ProposerSettings
from sidestep.ipc.transport.step import Int32

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def hash_of(*words: int) -> int:
    """Return 64 bits that follow from these words (SplitMix64; Steele et al. 2014)."""
    state = 0
    for word in words:
        state = ((state ^ (word & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class SyntheticProposer(Proposer):
    """Proposes the right token in a given share of positions, and a wrong one elsewhere.

    A hash of (seed, position, right token) decides, so that a position's draft is the same whatever
    the number of drafts and the steps before.
    """

    def __init__(self, settings: ProposerSettings) -> None:
        if not 0 <= settings.acceptance_rate <= 1:
            raise ValueError(f"an acceptance rate of {settings.acceptance_rate} is not in 0 .. 1")
        if settings.acceptance_rate > 0 and settings.oracle is None:
            raise ValueError("an acceptance rate above 0 needs an oracle of the right tokens")
        self._settings = settings
        self._threshold = round(settings.acceptance_rate * 2**64)

    def __repr__(self) -> str:
        kind = "right" if self._settings.oracle else "pseudo-random"
        return f"SyntheticProposer({self._settings.acceptance_rate:.0%} of {kind} tokens)"

    def begin(self, slot: int, tokens: Int32) -> None:
        """Do nothing, since nothing is kept by slot."""

    def propose(self, slot: int, tokens: Int32, num: int) -> Int32:
        """Return `num` drafts, or as many as the oracle knows tokens."""
        oracle, first = self._settings.oracle, len(tokens)
        if oracle is None:
            drafts = [self._random(first + i) for i in range(num)]
        else:
            right = oracle(slot, num)[:num].tolist() if num else []
            drafts = [self._right_or_wrong(first + i, token) for i, token in enumerate(right)]
        return np.array(drafts, np.int32)

    def _random(self, position: int) -> int:
        return hash_of(self._settings.seed, position) % self._settings.vocab_size

    def _right_or_wrong(self, position: int, right: int) -> int:
        """Return the right token of a position or, by its hash, another one."""
        vocab_size = self._settings.vocab_size
        chance = hash_of(self._settings.seed, position, right)
        if chance < self._threshold:
            return right
        other = hash_of(chance) % max(vocab_size - 1, 1)
        return (right + 1 + other) % vocab_size
