"""Figures of the server and of the engine in Prometheus' text format.

The names end like those of vLLM, so its dashboards need only another prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from sidestep.frontend.replicas.engine_client import Origin
from sidestep.frontend.replicas.replica_status import ReplicaStatus
from sidestep.frontend.server.observe.figures import Figures, TenantCounts
from sidestep.frontend.server.observe.metrics import HISTOGRAMS
from sidestep.ipc.transport.records import STEP_KINDS, WAIT_REASONS

PREFIX = "sidestep:"
"""First part of each metric's name."""
_VLLM = "vllm:"
"""First part of the names that endpoint pickers know."""
_ENGINE_GAUGES = {
    "num_requests_running": ("num_running", "Requests that the engine computes."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for the engine."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of the KV cache that is held, from 0 to 1."),
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Requests that had to make room for others."),
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    "prefix_cache_hits": (
        "prefix_cache_hits",
        "Prompt tokens that were found in the prefix cache.",
    ),
    "engine_steps": ("num_steps", "Steps that were scheduled."),
    "postponed_tokens": (
        "num_postponed_tokens",
        "Tokens that came a step later for want of a grammar's mask.",
    ),
    "device_busy_seconds": ("device_busy_s", "Time in which the device computed."),
    "device_no_work_seconds": ("device_no_work_s", "Time in which there was nothing to compute."),
}
_SPECULATION = {
    "spec_decode_num_drafts": "Rows of steps that verified drafts.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
}
"""Counters of an engine with speculation, each by the name of its statistic."""
_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_ENGINE = ("engine",)
"""Label with a replica's number."""
Stats = Mapping[int, Mapping[str, float]]
"""Number of a replica -> its statistics by name."""
_IDLE_CAUSES = ("result", "schedule", "prepare")
_RESET_CAUSES = ("oom", "exception")


class Exposition:
    """Make the text for one server."""

    def __init__(self, model_name: str, *, with_vllm: bool = False) -> None:
        """Make no text yet. with_vllm: add the gauges that endpoint pickers know by vLLM's name."""
        self._with_vllm = with_vllm
        self._label = {"model_name": model_name}

    def text(
        self,
        engines: Stats,
        replicas: Sequence[ReplicaStatus],
        figures: Figures,
        caches: Sequence[tuple[int, int]],
    ) -> bytes:
        """Return the metrics in the text format.

        engines: the statistics of each replica that answers. figures: the counts of all of the
        server's processes. caches: tokens of a KV block, and number of blocks, of each replica.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            _Collected(
                [
                    *self._of_engines(engines, replicas),
                    *(self._for_pickers(engines, caches) if self._with_vllm else ()),
                    *self._of_recovery(figures),
                    *self._of_server(figures),
                    self._of_strangers(engines, figures),
                    *self._of_tenants(figures.tenants),
                ]
            )
        )
        return generate_latest(registry)

    def _of_engines(self, engines: Stats, replicas: Sequence[ReplicaStatus]) -> Iterator[Metric]:
        yield self._gauge(
            "engine_alive",
            "Whether a replica serves: 1, or 0 while it is dead or being started again.",
            {
                (str(status.number),): float(status.dead is None and status.restarting is None)
                for status in replicas
            },
            _ENGINE,
        )
        yield self._gauge(
            "engine_stalled",
            "Whether a replica lives and makes no progress: 1, else 0.",
            {(str(status.number),): float(status.stalled is not None) for status in replicas},
            _ENGINE,
        )
        yield from self._load_of_engines(engines, PREFIX)
        for name, (key, text) in _ENGINE_COUNTERS.items():
            yield self._counter(
                name,
                text,
                {(str(engine),): stats[key] for engine, stats in engines.items()},
                _ENGINE,
            )
        yield self._counter(
            "device_idle_seconds",
            "Time in which the device stood still although there was work.",
            {
                (str(engine), cause): stats[f"device_idle_{cause}_s"]
                for engine, stats in engines.items()
                for cause in _IDLE_CAUSES
            },
            (*_ENGINE, "cause"),
        )
        yield from self._of_soft_resets(engines)
        yield self._counter(
            "queue_wait_seconds",
            "Time that requests have waited, of all together, by what for.",
            {
                (str(engine), reason): stats[f"queue_wait_{reason}_s"]
                for engine, stats in engines.items()
                for reason in WAIT_REASONS
            },
            (*_ENGINE, "reason"),
        )
        speculating = {
            engine: stats for engine, stats in engines.items() if "spec_decode_num_drafts" in stats
        }
        if speculating:
            yield from self._of_speculation(speculating)
        steps = SummaryMetricFamily(
            PREFIX + "step_time_seconds",
            "The device's time for a step, by what it did.",
            labels=[*self._label, *_ENGINE, "kind"],
        )
        for engine, stats in engines.items():
            for kind in STEP_KINDS:
                steps.add_metric(
                    [*self._label.values(), str(engine), kind],
                    int(stats[f"{kind}_steps"]),
                    stats[f"{kind}_step_s"],
                )
        yield steps

    def _of_soft_resets(self, engines: Stats) -> Iterator[Metric]:
        yield self._gauge(
            "max_step_tokens",
            "Most tokens of a step: fewer for some time after a want of memory.",
            {(str(engine),): stats["max_step_tokens"] for engine, stats in engines.items()},
            _ENGINE,
        )
        yield self._counter(
            "soft_resets",
            "Steps that failed and were run again, by cause.",
            {
                (str(engine), cause): stats[f"soft_resets_{cause}"]
                for engine, stats in engines.items()
                for cause in _RESET_CAUSES
            },
            (*_ENGINE, "cause"),
        )

    def _load_of_engines(self, engines: Stats, prefix: str) -> Iterator[Metric]:
        for name, (key, text) in _ENGINE_GAUGES.items():
            values = {(str(engine),): stats[key] for engine, stats in engines.items()}
            yield self._gauge(name, text, values, _ENGINE, prefix=prefix)

    def _for_pickers(self, engines: Stats, caches: Sequence[tuple[int, int]]) -> Iterator[Metric]:
        """Yield the metrics that choose a server for a request, by the names of vLLM."""
        yield from self._load_of_engines(engines, _VLLM)
        yield self._gauge(
            "cache_config_info",
            "Size of the KV cache: its blocks, and the tokens of one.",
            {
                (str(engine), str(size), str(count)): 1.0
                for engine, (size, count) in enumerate(caches)
                if engine in engines
            },
            (*_ENGINE, "block_size", "num_gpu_blocks"),
            prefix=_VLLM,
        )

    def _of_speculation(self, engines: Stats) -> Iterator[Metric]:
        """Yield the metrics of engines that have drafts."""
        for name, text in _SPECULATION.items():
            yield self._counter(
                name,
                text,
                {(str(engine),): stats[name] for engine, stats in engines.items()},
                _ENGINE,
            )
        yield self._counter(
            _BY_POSITION,
            "Drafts that were accepted, by their position in a row, from 0.",
            {
                (str(engine), name.rpartition("_")[2]): value
                for engine, stats in engines.items()
                for name, value in stats.items()
                if name.startswith(_BY_POSITION)
            },
            (*_ENGINE, "position"),
        )
        yield self._gauge(
            "spec_decode_draft_length",
            "Most drafts that each row of a step without prompts verifies now; 0 for none.",
            {
                (str(engine),): stats["spec_decode_draft_length"]
                for engine, stats in engines.items()
            },
            _ENGINE,
        )
        yield self._gauge(
            "spec_decode_acceptance_length",
            "Mean tokens of a row that verified drafts, since the start.",
            {
                (str(engine),): 1
                + stats["spec_decode_num_accepted_tokens"] / stats["spec_decode_num_drafts"]
                for engine, stats in engines.items()
                if stats["spec_decode_num_drafts"]
            },
            _ENGINE,
        )

    def _of_recovery(self, figures: Figures) -> Iterator[Metric]:
        for name, text, count in (
            (
                "replayed_requests",
                "Requests that went on after the death of the replica that had them.",
                figures.num_replayed,
            ),
            (
                "blamed_requests",
                "Requests that ended as the cause of a replica's death.",
                figures.num_blamed,
            ),
            (
                "replay_pause_seconds",
                "Time that requests have waited for a replica to serve again, all together.",
                figures.replay_pause_s,
            ),
            (
                "replicas_joined",
                "Replicas that were added because of the load.",
                figures.num_joined,
            ),
            (
                "replicas_left",
                "Replicas that were ended because the load did not need them.",
                figures.num_left,
            ),
        ):
            yield self._counter(name, text, {(): count})
        yield self._gauge(
            "probation_requests",
            "Requests that run in probation after a replica's death, or wait for their turn.",
            {(): figures.num_suspects},
        )
        yield self._gauge(
            "predicted_ttft_seconds",
            "Foreseen time until the first token of a request that comes now.",
            {(): figures.forecast_s},
        )

    def _of_server(self, figures: Figures) -> Iterator[Metric]:
        for name, text, count in (
            (
                "prompt_tokens",
                "Tokens of the prompts of requests that have ended.",
                figures.prompt_tokens,
            ),
            (
                "prompt_tokens_cached",
                "Those of them that the prefix cache had.",
                figures.cached_tokens,
            ),
            (
                "generation_tokens",
                "Tokens of the outputs of requests that have ended.",
                figures.generation_tokens,
            ),
            (
                "frontend_tokens",
                "Tokens that the server's processes have taken in, as they come.",
                figures.tokens_received,
            ),
            ("frontend_cpu_seconds", "CPU time of the server's processes.", figures.cpu_seconds),
        ):
            yield self._counter(name, text, {(): count})
        yield self._gauge(
            "api_processes",
            "Processes of the server that have given their figures for this.",
            {(): figures.num_processes},
        )
        yield self._counter(
            "request_success",
            "Choices that have ended, by how.",
            {(reason,): count for reason, count in figures.finished.items()},
            ("finished_reason",),
        )
        yield self._counter(
            "admission_rejections",
            "Requests that were not admitted, by reason.",
            {(reason,): count for reason, count in figures.rejections.items()},
            ("reason",),
        )
        yield self._counter(
            "replica_restarts",
            "Starts of replicas after a death, by where the death began.",
            {(origin,): figures.restarts.get(origin, 0) for origin in get_args(Origin)},
            ("cause",),
        )
        yield self._counter(
            "http_responses", "Answers, by route and status.", figures.responses, ("path", "status")
        )
        for name, histogram in figures.histograms.items():
            text, bounds = HISTOGRAMS[name]
            family = HistogramMetricFamily(PREFIX + name, text, labels=list(self._label))
            family.add_metric(
                list(self._label.values()), _buckets(bounds, histogram.counts), histogram.sum
            )
            yield family

    def _of_strangers(self, engines: Stats, figures: Figures) -> Metric:
        at_relays = sum(stats.get("num_refused_peers", 0.0) for stats in engines.values())
        return self._counter(
            "refused_peers",
            "Peers without a key that were refused at the ports for other hosts.",
            {(): figures.num_refused_peers + at_relays},
        )

    def _of_tenants(self, tenants: dict[str, TenantCounts]) -> Iterator[Metric]:
        yield self._gauge(
            "tenant_requests_running",
            "Choices whose clients wait, by tenant.",
            {(tenant,): counts.running for tenant, counts in tenants.items()},
            ("tenant",),
        )
        for name, text, field in (
            ("tenant_requests", "Choices that have ended, by tenant.", "requests"),
            ("tenant_prompt_tokens", "Tokens of their prompts.", "prompt_tokens"),
            ("tenant_generation_tokens", "Tokens of their outputs.", "generation_tokens"),
        ):
            yield self._counter(
                name,
                text,
                {(tenant,): getattr(counts, field) for tenant, counts in tenants.items()},
                ("tenant",),
            )

    def _gauge(
        self,
        name: str,
        text: str,
        values: Mapping[Any, float],
        labels: tuple[str, ...] = (),
        *,
        prefix: str = PREFIX,
    ) -> Metric:
        family = GaugeMetricFamily(prefix + name, text, labels=[*self._label, *labels])
        for key, value in values.items():
            family.add_metric([*self._label.values(), *key], value)
        return family

    def _counter(
        self, name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._label, *labels])
        for key, value in values.items():
            family.add_metric([*self._label.values(), *key], value)
        return family


class _Collected:
    """Collector of finished metrics, for the library's registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        return self._metrics


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, as the library takes them."""
    return list(zip((*map(str, bounds), "+Inf"), map(float, accumulate(counts)), strict=True))
