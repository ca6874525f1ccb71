"""Counters and histograms of one process of the server.

They are plain numbers and lists, because some of them change with each token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import copy

from sidestep.frontend.output.outputs import RequestMetrics, RequestOutput
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.server.observe.figures import Figures, HistogramFigures, TenantCounts
from sidestep.frontend.server.observe.window import Window

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
)
_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": (
        "Between two tokens of a streamed request; tokens that come together share the time.",
        _SECONDS,
    ),
    "request_time_per_output_token_seconds": (
        "A request's time after its first token, by token.",
        _SECONDS,
    ),
    "e2e_request_latency_seconds": ("From the request's arrival to its last token.", _SECONDS),
    "request_queue_time_seconds": ("From the engine's queue to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _COUNTS),
    "request_generation_tokens": ("Tokens of a request's output.", _COUNTS),
    "request_params_n": ("Choices that a request asked for.", _COUNTS[:8]),
}
"""Name of a histogram -> its help text, and the upper bounds of its buckets."""


class Histogram:
    """Histogram of values. One observation costs a third of a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class ServerMetrics:
    """Counters and histograms of one process of a server."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.token_gaps = self.histograms["inter_token_latency_seconds"]
        self.last_ttfts, self.last_gaps = Window(1024), Window(4096)
        """Seconds to the first token of the last requests, and seconds between the last tokens."""
        self.finished: Counter[str] = Counter()
        """Reason of the end -> number of choices."""
        self.responses: Counter[tuple[str, str]] = Counter()
        """Route and status -> number of answers."""
        self.rejections: Counter[str] = Counter()
        """Reason -> number of requests that were not admitted."""
        self.tenants: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        """Name of a tenant, which is never its key -> its counts.

        There are at most as many tenants as keys."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0

    def choice_ended(
        self, tenant: str, output: RequestOutput | None, reason: str, *, is_first: bool
    ) -> None:
        """Count a choice that has ended.

        output: the choice's last output, if it gave any. reason: how the choice ended. is_first:
        whether it is the first choice of its prompt; the prompt's tokens are counted with it.
        """
        self.finished[reason] += 1
        counts = self.tenants[tenant]
        counts.running -= 1
        counts.requests += 1
        if output is None:
            return
        metrics, observe = output.metrics, self._observe
        if is_first:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens or 0
            counts.prompt_tokens += len(output.prompt_token_ids)
            observe("request_prompt_tokens", float(len(output.prompt_token_ids)))
        self.generation_tokens += metrics.num_generation_tokens
        counts.generation_tokens += metrics.num_generation_tokens
        observe("request_generation_tokens", float(metrics.num_generation_tokens))
        for name, seconds in _spans(metrics):
            observe(name, seconds)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def figures(
        self,
        tokens_received: int,
        recovery: RecoveryCounts,
        num_refused_peers: int,
        forecast_s: float,
    ) -> Figures:
        """Return a copy of the counts, which other processes can add to theirs."""
        return Figures(
            histograms={
                name: HistogramFigures(each.counts.copy(), each.sum)
                for name, each in self.histograms.items()
            },
            finished=dict(self.finished),
            responses=dict(self.responses),
            rejections=dict(self.rejections),
            tenants={name: copy(counts) for name, counts in self.tenants.items()},
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.generation_tokens,
            tokens_received=tokens_received,
            restarts={str(origin): count for origin, count in recovery.restarts.items()},
            num_replayed=recovery.replayed,
            num_blamed=recovery.blamed,
            num_suspects=recovery.suspects,
            replay_pause_s=recovery.pause_s,
            num_refused_peers=num_refused_peers,
            num_joined=recovery.joined,
            num_left=recovery.left,
            forecast_s=forecast_s,
            cpu_seconds=time.process_time(),
            last_ttfts=self.last_ttfts.values(),
            last_gaps=self.last_gaps.values(),
        )


def _spans(metrics: RequestMetrics) -> Iterator[tuple[str, float]]:
    """Yield histogram and seconds of each span between events of a request that have happened."""
    first, last, scheduled = metrics.first_token_ts, metrics.last_token_ts, metrics.scheduled_ts
    if scheduled is not None and metrics.queued_ts is not None:
        yield "request_queue_time_seconds", max(0.0, scheduled - metrics.queued_ts)
    if first is None or last is None:
        return
    yield "time_to_first_token_seconds", first - metrics.arrival_time
    yield "e2e_request_latency_seconds", last - metrics.arrival_time
    yield "request_decode_time_seconds", last - first
    if metrics.num_generation_tokens > 1:
        yield (
            "request_time_per_output_token_seconds",
            (last - first) / (metrics.num_generation_tokens - 1),
        )
    if scheduled is not None:
        yield "request_prefill_time_seconds", max(0.0, first - scheduled)
        yield "request_inference_time_seconds", max(0.0, last - scheduled)
