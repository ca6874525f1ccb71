"""OpenTelemetry spans of requests."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from sidestep import AsyncLLM, EngineArgs
from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.app import make_app
from sidestep.frontend.server.observe.tracing import Tracing
from sidestep.frontend.server.service.service import Service
from tests.server.live import ROOT, LiveServer

PHASES = ["queue", "prefill", "decode", "deliver"]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY: dict[str, Any] = {"prompt": "x" * 20, "max_tokens": 5, "ignore_eos": True}


@asynccontextmanager
async def traced(
    model: str, **options: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, InMemorySpanExporter]]:
    """Yield a client of the application over an engine on the fake device, and its spans."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), "1.2.3")
    async with AsyncLLM.from_engine_args(
        EngineArgs(model=model, device="fake", fake_step_ms=2, **options)
    ) as llm:
        app = make_app(Service(llm, ServerArgs(), ("fake",), tracing), Keys(), "1.2.3")
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, exporter
    tracing.close()


def trees(exporter: InMemorySpanExporter) -> list[tuple[ReadableSpan, list[ReadableSpan]]]:
    """Return each choice's span and its child spans, in the order of time."""
    spans = exporter.get_finished_spans()
    found = []
    for root in (span for span in spans if span.name == "generate"):
        below = [
            s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id
        ]
        found.append((root, sorted(below, key=lambda s: s.start_time or 0)))
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_divided_into_its_phases_at_their_real_times(
    stream: bool, fake_model: str
) -> None:
    async with traced(fake_model) as (client, exporter):
        before = time.time_ns()
        answer = await client.post("/v1/completions", json={**BODY, "stream": stream})
        after = time.time_ns()
        ((root, below),) = trees(exporter)
        assert answer.status_code == 200
    assert [span.name for span in below] == PHASES
    assert (
        root.parent is None
        and root.kind is SpanKind.SERVER
        and root.status.status_code is StatusCode.UNSET
    )
    moments = [below[0].start_time, *(span.end_time for span in below)]
    assert [span.start_time for span in below[1:]] == moments[1:-1]  # without gaps
    assert (root.start_time, root.end_time) == (moments[0], moments[-1])
    slack = 10**7  # two clocks, read one after the other
    assert moments[0] is not None and moments[-1] is not None
    assert before - slack <= moments[0] <= moments[-1] <= after + slack
    # Five steps of two milliseconds, one after the other.
    began, ended = below[1].start_time, below[2].end_time
    assert began is not None and ended is not None and ended - began >= 9.99e6
    assert root.attributes is not None
    assert (
        root.attributes["gen_ai.usage.input_tokens"],
        root.attributes["gen_ai.usage.output_tokens"],
    ) == (20, 5)
    assert root.attributes["gen_ai.request.model"] == "fake"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.resource.attributes["service.name"] == "sidestep"
    assert root.resource.attributes["service.version"] == "1.2.3"


async def test_what_a_client_says_of_its_request_is_in_the_span(fake_model: str) -> None:
    async with traced(fake_model) as (client, exporter):
        notes = {
            "user": "me",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "metadata": {"job": "7"},
        }
        await client.post("/v1/completions", json={**BODY, **notes})
        ((root, _),) = trees(exporter)
    assert root.attributes is not None
    told = {
        name: root.attributes[f"sidestep.client.{name}"]
        for name in ("user", "safety_identifier", "prompt_cache_key", "metadata.job")
    }
    assert told == {
        "user": "me",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "metadata.job": "7",
    }


async def test_the_caller_s_trace_is_taken_over_and_so_is_its_wish_not_to_be_sampled(
    fake_model: str,
) -> None:
    async with traced(fake_model) as (client, exporter):
        await client.post("/v1/completions", json={**BODY, "n": 2}, headers={"traceparent": PARENT})
        found = trees(exporter)
        assert len(found) == 2
        for root, below in found:
            assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
            assert {f"{span.context.trace_id:032x}" for span in (root, *below)} == {
                PARENT.split("-")[1]
            }
        exporter.clear()
        await client.post("/v1/completions", json=BODY, headers={"traceparent": PARENT[:-1] + "0"})
        assert exporter.get_finished_spans() == ()
        await client.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
        ((root, _),) = trees(exporter)
        assert root.parent is None


async def test_a_request_that_is_not_admitted_is_an_error_and_one_that_ends_early_has_its_part(
    fake_model: str,
) -> None:
    async with traced(fake_model, max_num_queued_reqs=1) as (client, exporter):
        assert (
            await client.post("/v1/completions", json={**BODY, "prompt": ["x", "y"]})
        ).status_code == 429
        reasons = {
            root.attributes["gen_ai.response.finish_reasons"]: (root, below)
            for root, below in trees(exporter)
            if root.attributes is not None
        }
        root, below = reasons["rejected",]
        assert root.status.status_code is StatusCode.ERROR and below == []
        # A busy machine may not begin a request in time. All tokens take two seconds at least.
        for deadline in (200, 400, 800, 1600):
            exporter.clear()
            long = {**BODY, "max_tokens": 1000, "deadline_ms": deadline}
            assert (await client.post("/v1/completions", json=long)).status_code == 200
            ((root, below),) = trees(exporter)
            if len(below) > 1:
                break
        assert [span.name for span in below] == PHASES
        assert root.attributes is not None and root.attributes[
            "gen_ai.response.finish_reasons"
        ] == ("abort",)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Yield a collector of traces: its URL, and the data that it has received."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(
                ExportTraceServiceRequest.FromString(
                    self.rfile.read(int(self.headers["content-length"]))
                )
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
        server.shutdown()
        thread.join()


def test_a_server_sends_its_spans_to_a_collector_before_it_ends(
    collector: tuple[str, list[ExportTraceServiceRequest]], make_server: Callable[..., LiveServer]
) -> None:
    url, taken = collector
    server = make_server("--otlp-traces-endpoint", url)
    assert server.post("/v1/completions", BODY, traceparent=PARENT).status_code == 200
    assert server.close() == 0, server.log
    spans = [
        span
        for request in taken
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == sorted(["generate", *PHASES])
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", ""])
def test_an_endpoint_that_is_no_url_is_refused(
    endpoint: str, fake_model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from sidestep.frontend.main import main

    assert main(["serve", fake_model, "--device", "fake", "--otlp-traces-endpoint", endpoint]) == 1
    assert "otlp_traces_endpoint: " in capfd.readouterr().err


def test_a_server_that_is_not_asked_for_spans_imports_nothing_for_them() -> None:
    code = (
        "import sys; from sidestep.frontend.cli import serve\n"
        "from sidestep.frontend.server.processes import run\n"
        "assert serve.make_tracing(None, '') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sidestep.frontend.main import main\n"
        "sys.exit(main(['serve', '--port', '0', '--otlp-traces-endpoint', 'http://127.0.0.1:1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "sidestep: opentelemetry is missing; install it: pip install 'sidestep[otel]'"
    ]
