"""The server's counts, and the engine's beside them, as Prometheus reads them.

Names end as those of vLLM do, so its dashboards need another prefix only. What is counted for each token is counted
here, in plain lists; the library gets them when it is asked for the text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from sidestep.frontend.outputs import RequestMetrics, RequestOutput
from sidestep.frontend.server.window import Window
from sidestep.ipc.records import STEP_KINDS, WAIT_REASONS

PREFIX = "sidestep:"
_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
            25.0, 50.0, 100.0, 250.0)
_COUNTS = tuple(float(digit * 10 ** power) for power in range(6) for digit in (1, 2, 5))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a streamed request.", _SECONDS),
    "request_time_per_output_token_seconds": ("A request's time after its first token, by token.", _SECONDS),
    "e2e_request_latency_seconds": ("From the request's arrival to its last token.", _SECONDS),
    "request_queue_time_seconds": ("From the engine's queue to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _COUNTS),
    "request_generation_tokens": ("Tokens of a request's output.", _COUNTS),
    "request_params_n": ("Choices that a request asked for.", _COUNTS[:8]),
}
_ENGINE_GAUGES = {
    "num_requests_running": ("num_running", "Requests that the engine computes."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for the engine."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV cache that is held, from 0 to 1."),
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Requests that had to make room for others."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    "engine_steps": ("num_steps", "Steps that were scheduled."),
    "device_busy_seconds": ("device_busy_s", "Time in which the device computed."),
    "device_no_work_seconds": ("device_no_work_s", "Time in which there was nothing to compute."),
}
_IDLE_CAUSES = ("result", "schedule", "prepare")


class Histogram:
    """Counts of values by size; an observation costs a third of a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times` values of this size."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum, as the library takes them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


@dataclass
class TenantCounts:
    """What one tenant has asked for: one API key, or whoever comes to a server without any."""

    running: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class ServerMetrics:
    """All that one server counts."""

    def __init__(self, model_name: str) -> None:
        self._label = {"model_name": model_name}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.token_gaps = self.histograms["inter_token_latency_seconds"]
        self.last_ttfts, self.last_gaps = Window(1024), Window(4096)
        """Seconds to the first token of the last requests, and between the last tokens."""
        self.finished: Counter[str] = Counter()
        """Requests by how they ended."""
        self.responses: Counter[tuple[str, str]] = Counter()
        """Answers by route and status."""
        self.rejections: Counter[str] = Counter()
        """Requests that were not admitted, by reason."""
        self.tenants: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        """By the tenant's name, which is never its key; as many as there are keys at most."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0

    def choice_ended(self, tenant: str, output: RequestOutput | None, reason: str, *, is_first: bool) -> None:
        """One choice has ended; `output` is its last one, if it gave any. is_first: of those of its prompt, which is
        counted with it."""
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

    def text(self, engine: dict[str, float], frontend_tokens: int) -> bytes:
        """The text format; `engine` is what the engine says of itself, `frontend_tokens` how many tokens this process
        has taken in."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*self._of_engine(engine), *self._of_server(frontend_tokens),
                                      *self._of_tenants()]))
        return generate_latest(registry)

    def _of_engine(self, engine: dict[str, float]) -> Iterator[Metric]:
        for name, (key, text) in _ENGINE_GAUGES.items():
            yield self._gauge(name, text, engine[key])
        for name, (key, text) in _ENGINE_COUNTERS.items():
            yield self._counter(name, text, {(): engine[key]})
        yield self._counter("device_idle_seconds", "Time in which the device stood still although there was work.",
                            {(cause,): engine[f"device_idle_{cause}_s"] for cause in _IDLE_CAUSES}, ("cause",))
        yield self._counter("queue_wait_seconds", "Time that requests have waited, of all together, by what for.",
                            {(reason,): engine[f"queue_wait_{reason}_s"] for reason in WAIT_REASONS}, ("reason",))
        steps = SummaryMetricFamily(PREFIX + "step_time_seconds", "The device's time for a step, by what it did.",
                                    labels=[*self._label, "kind"])
        for kind in STEP_KINDS:
            steps.add_metric([*self._label.values(), kind], int(engine[f"{kind}_steps"]), engine[f"{kind}_step_s"])
        yield steps

    def _of_server(self, frontend_tokens: int) -> Iterator[Metric]:
        for name, text, count in (
                ("prompt_tokens", "Tokens of the prompts of requests that have ended.", self.prompt_tokens),
                ("prompt_tokens_cached", "Those of them that the prefix cache had.", self.cached_tokens),
                ("generation_tokens", "Tokens of the outputs of requests that have ended.", self.generation_tokens),
                ("frontend_tokens", "Tokens that the server's process has taken in, as they come.", frontend_tokens),
                ("frontend_cpu_seconds", "CPU time of the server's process.", time.process_time())):
            yield self._counter(name, text, {(): count})
        yield self._counter("request_success", "Choices that have ended, by how.",
                            {(reason,): count for reason, count in self.finished.items()}, ("finished_reason",))
        yield self._counter("admission_rejections", "Requests that were not admitted, by reason.",
                            {(reason,): count for reason, count in self.rejections.items()}, ("reason",))
        yield self._counter("http_responses", "Answers, by route and status.", self.responses, ("path", "status"))
        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, _HISTOGRAMS[name][0], labels=list(self._label))
            buckets, total = histogram.collect()
            family.add_metric(list(self._label.values()), buckets, total)
            yield family

    def _of_tenants(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(PREFIX + "tenant_requests_running", "Choices whose clients wait, by tenant.",
                                    labels=[*self._label, "tenant"])
        for tenant, counts in self.tenants.items():
            running.add_metric([*self._label.values(), tenant], counts.running)
        yield running
        for name, text, field in (
                ("tenant_requests", "Choices that have ended, by tenant.", "requests"),
                ("tenant_prompt_tokens", "Tokens of their prompts.", "prompt_tokens"),
                ("tenant_generation_tokens", "Tokens of their outputs.", "generation_tokens")):
            yield self._counter(name, text, {(tenant,): getattr(counts, field)
                                             for tenant, counts in self.tenants.items()}, ("tenant",))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family

    def _counter(self, name: str, text: str, values: dict[tuple[str, ...], float] | Counter[tuple[str, str]],
                 labels: tuple[str, ...] = ()) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._label, *labels])
        for key, value in values.items():
            family.add_metric([*self._label.values(), *key], value)
        return family


class _Collected:
    """What the library's registry wants: something to ask."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _spans(metrics: RequestMetrics) -> Iterator[tuple[str, float]]:
    """The times between a request's events, of those that have come."""
    first, last, scheduled = metrics.first_token_ts, metrics.last_token_ts, metrics.scheduled_ts
    if scheduled is not None and metrics.queued_ts is not None:
        yield "request_queue_time_seconds", max(0.0, scheduled - metrics.queued_ts)
    if first is None or last is None:
        return
    yield "time_to_first_token_seconds", first - metrics.arrival_time
    yield "e2e_request_latency_seconds", last - metrics.arrival_time
    yield "request_decode_time_seconds", last - first
    if metrics.num_generation_tokens > 1:
        yield "request_time_per_output_token_seconds", (last - first) / (metrics.num_generation_tokens - 1)
    if scheduled is not None:
        yield "request_prefill_time_seconds", max(0.0, first - scheduled)
        yield "request_inference_time_seconds", max(0.0, last - scheduled)
