"""The choices of one request, merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sidestep.frontend.input.input_processor import BestOf
from sidestep.frontend.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.params.sampling_params import RequestOutputKind


class Choices:
    """The states of all choices of a request, by index, and their one reader."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        self._states = states
        self._kind = states[0].output_kind
        self._best_of = states[0].best_of
        self._live = list(states)
        """Choices whose end the reader has not received."""
        self._began = False
        """Whether the reader has had an output."""
        self._last: list[RequestOutput | None] = [None] * len(states)

    def __repr__(self) -> str:
        return f"Choices({len(self._live)} of {len(self._states)} live)"

    async def next_output(self) -> RequestOutput:
        """Return the next output, as soon as any choice has something new.

        With DELTA it holds the choices that have something new, else all. Raises the error that the
        request failed with.
        """
        while not self._has_news():
            wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for state in self._live:
                state.wake_on(wake)
            try:
                await wake
            finally:
                for state in self._live:
                    state.wake_on(None)
        news = [state for state in self._live if state.has_news()]
        for state in news:
            self._last[state.index] = state.take()
        self._live = [state for state in self._live if not state.is_finished]
        told = news if self._kind is RequestOutputKind.DELTA else self._states
        completions = [
            c for state in told for c in (self._last[state.index] or state.take()).outputs
        ]
        return self._together(
            completions if self._best_of is None else best(completions, self._best_of)
        )

    def _has_news(self) -> bool:
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return all(state.is_finished for state in self._live) or any(
                state.has_failed for state in self._live
            )
        return any(state.has_news() for state in self._live)

    def _together(self, completions: list[CompletionOutput]) -> RequestOutput:
        first = self._states[0].request_output(
            completions, is_first=not self._began or self._kind is not RequestOutputKind.DELTA
        )
        self._began = True
        first.finished = not self._live
        first.metrics = _sum([state.metrics for state in self._states])
        return first


def best(completions: Sequence[CompletionOutput], best_of: BestOf) -> list[CompletionOutput]:
    """Return the completions with the highest cumulative logprob.

    The best is first, and they are numbered in this order.
    """
    ranked = sorted(completions, key=lambda c: -(c.cumulative_logprob or 0.0))[: best_of.num]
    return [
        replace(c, index=i, logprobs=c.logprobs if best_of.with_logprobs else None)
        for i, c in enumerate(ranked)
    ]


def _sum(each: Sequence[RequestMetrics]) -> RequestMetrics:
    """Return the metrics of the request, which spans all of its choices."""
    first = each[0]
    begun = [m.first_token_ts for m in each if m.first_token_ts is not None]
    ended = [m.last_token_ts for m in each if m.last_token_ts is not None]
    return RequestMetrics(
        arrival_time=first.arrival_time,
        queued_ts=first.queued_ts,
        scheduled_ts=first.scheduled_ts,
        first_token_ts=min(begun, default=None),
        last_token_ts=max(ended, default=None),
        num_generation_tokens=sum(m.num_generation_tokens for m in each),
        num_preemptions=max(m.num_preemptions for m in each),
        num_drafts=_sum_known(m.num_drafts for m in each),
        num_draft_tokens=_sum_known(m.num_draft_tokens for m in each),
        num_accepted_tokens=_sum_known(m.num_accepted_tokens for m in each),
    )


def _sum_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the counts that are known; None if none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
