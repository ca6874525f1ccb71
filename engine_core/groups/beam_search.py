"""Beam search: which continuations go on, which have ended, and when nothing better can come.

The rules are those of transformers' `generate`. The best continuations of all beams are looked at,
twice as many as there are beams (more if several tokens end a sequence). Continuations that have
not ended go on, the best `beam_width` of them. Continuations that have ended count if they are
among the best `beam_width` of all, and the best `beam_width` of these are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sidestep.engine_core.requests.candidates import Candidates
from sidestep.ipc.params.beam_search_params import BeamSearchParams


class Ended(NamedTuple):
    """A continuation that has ended."""

    score: float
    """cumulative logprob / length ** length_penalty"""
    logprob: float
    token_ids: list[int]
    """Tokens without the prompt."""


class Chosen(NamedTuple):
    """A beam of the next step: the index of the beam it continues, and the token."""

    parent: int
    token: int


class BeamSearch:
    """The state of one search. Beams are indices; the caller keeps their tokens."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int], max_tokens: int) -> None:
        """Begin with one beam. eos_ids: tokens that end it. max_tokens: as in `params`, or less."""
        self._params = params
        self._eos = np.array(sorted(eos_ids), np.int32)
        self._max_tokens = max_tokens
        self._num_candidates = params.num_candidates(len(eos_ids))
        self.length = 0
        """Tokens of each beam."""
        self.scores = np.zeros(1, np.float32)
        """Cumulative logprobs in float32, as in transformers.

        There is one beam at first, then `beam_width`.
        """
        self.ended: list[Ended] = []
        """Continuations that have ended, the best first."""

    def __repr__(self) -> str:
        return (
            f"BeamSearch({len(self.scores)} beams of {self.length} tokens, {len(self.ended)} ended)"
        )

    def advance(
        self, candidates: Sequence[Candidates], outputs: Sequence[list[int]]
    ) -> list[Chosen]:
        """Take one step, and return the beams of the next one; none if the search is over.

        candidates: for each beam. outputs: each beam's tokens so far, without the prompt.
        """
        width = self._params.beam_width
        totals = np.concatenate(
            [score + c.logprobs for score, c in zip(self.scores, candidates, strict=True)]
        )
        tokens = np.concatenate([c.token_ids for c in candidates])
        parents = np.repeat(np.arange(len(candidates)), [len(c.token_ids) for c in candidates])
        best = np.argsort(-totals, kind="stable")[: self._num_candidates]
        self.length += 1
        ends = np.isin(tokens[best], self._eos) | (self.length >= self._max_tokens)
        for index in best[:width][ends[:width]].tolist():
            self._end(float(totals[index]), [*outputs[parents[index]], int(tokens[index])])
        going = best[~ends][:width]
        if not len(going) or self._is_over(float(totals[going[0]])):
            return []
        self.scores = totals[going]
        return [
            Chosen(parent, token)
            for parent, token in zip(parents[going].tolist(), tokens[going].tolist(), strict=True)
        ]

    def best(self, outputs: Sequence[list[int]]) -> list[Ended]:
        """Return the result when the search must stop here.

        It holds the continuations that have ended, filled up with running ones.
        """
        running = [
            Ended(self._score(float(score), max(1, self.length)), float(score), list(tokens))
            for score, tokens in zip(self.scores, outputs, strict=True)
            if tokens
        ]
        return (self.ended + sorted(running, reverse=True))[: self._params.beam_width]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _end(self, logprob: float, token_ids: list[int]) -> None:
        self.ended.append(Ended(self._score(logprob, self.length), logprob, token_ids))
        self.ended.sort(key=lambda e: -e.score)
        del self.ended[self._params.beam_width :]

    def _is_over(self, best_running: float) -> bool:
        """Return whether enough have ended, and no running beam is expected to become better."""
        stopping = self._params.early_stopping
        if len(self.ended) < self._params.beam_width:
            return False
        if stopping is True:
            return True
        longest = stopping == "never" and self._params.length_penalty > 0
        return (
            self._score(best_running, self._max_tokens if longest else self.length)
            <= self.ended[-1].score
        )
