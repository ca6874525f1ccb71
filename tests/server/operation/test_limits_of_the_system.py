"""Limits of the system, and a server's files.

The limits are open files, certificates, folders, and the server's end.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from sidestep.frontend.cli.serve import with_queue_limit
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.server.observe.tracing import Tracing
from sidestep.frontend.server.transport.http_protocol import FileWatch
from tests.fakes import Clock
from tests.server.live import ROOT, LiveServer, raw_request, until

Make = Callable[..., LiveServer]
SERVE = [sys.executable, "-m", "sidestep", "serve", "--device", "fake", "--port", "0"]


# Open files.


def test_a_server_opens_as_many_files_as_it_may(make_server: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard - 1, 200), hard))
    try:
        server = make_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    # At the limit the server logs a warning and serves the open connections. It accepts new ones
    # when these have closed.
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (100, hard))
    connections = [server.connect() for _ in range(120)]
    first = connections[0]
    first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert first.recv(1000).startswith(b"HTTP/1.1 200 ")
    # It accepts them one after the other.
    until(lambda: psutil.Process(server.process.pid).num_fds() >= 100)
    for connection in connections:
        connection.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60):
        pass
    assert server.close() == 0
    assert server.log.count("the limit on open files (100) is reached") == 1


def test_a_limit_that_stays_reached_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, limit = Clock(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    watch = FileWatch(clock)
    for descriptor, now, num in (
        (20, 0, 0),
        (limit - 1, 0, 1),
        (limit - 1, 59, 1),
        (limit - 2, 60, 2),
    ):
        clock.now = now
        watch.opened(descriptor)
        assert len(caplog.records) == num


# The queue.


def test_a_server_bounds_its_queue_unless_told_otherwise() -> None:
    assert with_queue_limit(EngineArgs()).max_num_queued_reqs == 4096
    assert with_queue_limit(EngineArgs(max_num_queued_reqs=7)).max_num_queued_reqs == 7
    assert (
        EngineArgs().max_num_queued_reqs is None
    )  # programs with an engine inside have their own queue


# The start.


def test_a_certificate_that_cannot_be_used_is_told_before_the_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    for file in ("cert.pem", "missing.pem"):
        done = subprocess.run(
            [*SERVE, "--ssl-certfile", str(tmp_path / file)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("sidestep: ssl_certfile: cannot be used: ")


@pytest.mark.parametrize("words", [(), ("-tp", "2"), ("--api-server-count", "2")])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_while_it_starts_it_leaves_no_folder(
    number: int, words: Sequence[str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*SERVE, *words],
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    until(lambda: bool(list(tmp_path.iterdir())) or process.poll() is not None)
    # Wait for the child, which removes the folder when its killed parent cannot.
    until(lambda: bool(children(process.pid)) or process.poll() is not None)
    process.send_signal(number)
    process.wait(60)
    until(lambda: not list(tmp_path.iterdir()))


def children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


# The end.


def test_two_interrupts_end_it_without_a_word(make_server: Make) -> None:
    server = make_server(step_ms=20)
    body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
    with server.connect() as stream, server.connect() as whole:
        stream.sendall(
            raw_request("/v1/completions", json.dumps({**body, "stream": True}).encode())
        )
        assert stream.recv(1000).startswith(b"HTTP/1.1 200 ")
        whole.sendall(raw_request("/v1/completions", json.dumps(body).encode()))
        server.until(lambda load: load["num_running"] == 2)
        server.forget_log()
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.http.get("/ready").status_code != 200)
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0 and server.log == ""


class Silent(SpanExporter):
    """A collector that accepts connections and never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.gave_up = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        if not self.released.wait(20):
            self.gave_up.set()
        return SpanExportResult.FAILURE


def test_a_collector_that_does_not_answer_does_not_delay_the_end() -> None:
    exporter = Silent()
    tracing = Tracing(BatchSpanProcessor(exporter), "1")
    tracing.begin("model", {}, {}).choice_ended("request", None, "stop")
    tracing.close()
    assert not exporter.gave_up.is_set()
    exporter.released.set()
