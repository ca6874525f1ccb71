"""OpenTelemetry spans of requests. Imported only when --otlp-traces-endpoint asks for them.

A choice's span is made when the choice has ended, from times that are measured in any case, so
tokens cost nothing more. Its children follow one another without gaps:
- `queue`: from the call to the first step
- `prefill`: to the first token
- `decode`: to the last token
- `deliver`: until everything has been handed to the client

A choice that ends early has only the children that it reached. The parent is the request's W3C
`traceparent`; its sender also decides on sampling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sidestep.frontend.output.outputs import RequestMetrics, RequestOutput

_PHASES = ("queue", "prefill", "decode", "deliver")
_FAILURES = ("error", "rejected")
_LAST_SPANS_S = 2.0
"""Most seconds for which the end of the server waits for a collector that does not answer."""
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Maker of the spans of one server."""

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME of the operator take precedence over these.
        own = Resource.create({"service.name": "sidestep", "service.version": version})
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sidestep", version)

    @classmethod
    def to_endpoint(cls, endpoint: str, version: str) -> Self:
        """Return an object that sends spans by OTLP over HTTP, from a thread of its own."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), version)

    def begin(
        self, model: str, headers: Mapping[str, str], notes: Mapping[str, str]
    ) -> RequestTrace:
        """Begin the trace of a request. notes: the client's notes about it, by name."""
        return RequestTrace(
            self._tracer, _propagator.extract(headers), model, time.monotonic(), notes
        )

    def close(self) -> None:
        """Send the remaining spans, within a bounded time; the library alone would retry longer."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(_LAST_SPANS_S)


@dataclass(frozen=True)
class RequestTrace:
    """Data of a request for the spans of its choices, which are made when the choices end."""

    tracer: Tracer
    parent: Context
    model: str
    begin: float
    """Start of the request, in seconds of time.monotonic()."""
    notes: Mapping[str, str]
    """Client's notes about the request, by name."""

    def choice_ended(self, request_id: str, last: RequestOutput | None, reason: str) -> None:
        """Make the spans of one choice. last: its last output, if it gave any."""
        end, since_epoch = time.monotonic(), time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + since_epoch) * 1e9)

        moments = [self.begin] if last is None else list(_moments(last.metrics, end))
        span = self.tracer.start_span(
            "generate", self.parent, SpanKind.SERVER, start_time=nanoseconds(moments[0])
        )
        span.set_attributes(
            {
                "gen_ai.request.model": self.model,
                "gen_ai.response.id": request_id,
                "gen_ai.response.finish_reasons": (reason,),
                **{f"sidestep.client.{name}": text for name, text in self.notes.items()},
            }
        )
        if last is not None:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": len(last.prompt_token_ids),
                    "gen_ai.usage.output_tokens": last.metrics.num_generation_tokens,
                    "sidestep.cached_tokens": last.num_cached_tokens or 0,
                    "sidestep.preemptions": last.metrics.num_preemptions,
                }
            )
        if reason in _FAILURES:
            span.set_status(Status(StatusCode.ERROR, reason))
        inside = set_span_in_context(span)
        for name, (start, stop) in zip(_PHASES, pairwise(moments), strict=False):
            self.tracer.start_span(name, inside, start_time=nanoseconds(start)).end(
                nanoseconds(stop)
            )
        span.end(nanoseconds(end))


def _moments(metrics: RequestMetrics, end: float) -> Iterator[float]:
    """Yield the borders of the phases that a choice reached, in seconds, in ascending order.

    The last border is `end`.
    """
    latest = metrics.arrival_time
    yield latest
    for moment in (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts):
        if moment is None:
            break
        # Two processes may read the same clock in another order than that of the events.
        latest = max(latest, min(moment, end))
        yield latest
    yield end
