"""The answers of the ranks to calls, until all ranks have answered."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.executor.base import Answered
from sidestep.ipc.transport.worker_calls import CallAnswer


class RankAnswers:
    """Collects answers by call."""

    def __init__(self, num_ranks: int, rank_name: Callable[[int], str]) -> None:
        """Begin without calls. rank_name: returns a rank's name for users."""
        self._num_ranks = num_ranks
        self._rank_name = rank_name
        self._open: dict[int, dict[int, CallAnswer]] = {}
        """By the call's number: the answers so far, by rank."""
        self._answered: list[Answered] = []
        self._next = 0

    def open(self) -> int:
        """Return the number of a new call, which all ranks will answer."""
        number, self._next = self._next, self._next + 1
        self._open[number] = {}
        return number

    def take(self, rank: int, answer: CallAnswer) -> None:
        """Take the answer of one rank."""
        answers = self._open[answer.number]
        answers[rank] = answer
        if len(answers) == self._num_ranks:
            del self._open[answer.number]
            by_rank = [answers[rank] for rank in range(self._num_ranks)]
            self._answered.append(
                Answered(
                    answer.number,
                    [one.result for one in by_rank],
                    self._errors(by_rank),
                    sum(one.error is not None for one in by_rank),
                )
            )

    def take_answered(self) -> list[Answered]:
        """Return the calls that all ranks have answered since the last time."""
        answered, self._answered = self._answered, []
        return answered

    def missing(self, number: int) -> str:
        """Return the names of the ranks that have not answered a call, for users."""
        answers = self._open.get(number, {})
        return ", ".join(self._rank_name(r) for r in range(self._num_ranks) if r not in answers)

    def _errors(self, answers: list[CallAnswer]) -> str | None:
        """Return the refusals as one text; ranks that say the same are not named."""
        texts = [answer.error for answer in answers]
        refusals = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if not refusals:
            return None
        if len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"{self._rank_name(rank)}: {text}" for rank, text in refusals)
