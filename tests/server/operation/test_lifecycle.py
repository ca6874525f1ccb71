"""How a server starts, drains and ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import psutil
import pytest

from tests.server.live import ROOT, LiveServer, raw_request, read_all, read_until, until

Make = Callable[..., LiveServer]
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 300, "ignore_eos": True}


def rest(stream: socket.socket) -> bytes:
    """Return the rest of a stream, and close it."""
    with stream:
        return read_all(stream)


def begin(server: LiveServer, body: dict[str, Any]) -> tuple[socket.socket, bytes]:
    """Return a stream whose first event is there, and the text that was read of it."""
    connection = server.connect()
    connection.sendall(
        raw_request("/v1/completions", json.dumps({**body, "stream": True}).encode())
    )
    return connection, read_until(connection, b"data: ")


def not_ready(server: LiveServer) -> httpx2.Response | None:
    """Return the answer of a server that is not ready; None if it is."""
    answer = server.http.get("/ready")
    return None if answer.status_code == 200 else answer


def not_taken(server: LiveServer) -> httpx2.Response | None:
    """Return the answer of a server that refuses a request; None if it answers it."""
    answer = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
    return None if answer.status_code == 200 else answer


def test_running_requests_end_before_the_server_does(make_server: Make) -> None:
    server = make_server(step_ms=10)
    stream, data = begin(server, LONG)
    whole = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG)))
    answers: list[Any] = []
    whole.start()
    server.until(lambda load: load["num_running"] == 2)
    server.process.send_signal(signal.SIGTERM)
    ready = until(lambda: not_ready(server))
    assert ready.status_code == 503 and ready.json()["error"]["code"] == "draining"
    assert server.http.get("/health").status_code == 200
    refused = server.post("/v1/completions", {"prompt": "hi"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    data += rest(stream)
    whole.join()
    assert (
        data.rstrip().endswith(b"0")
        and b'"finish_reason":"length"' in data
        and b"data: [DONE]" in data
    )
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert server.wait() == 0


def test_service_managers_may_signal_every_process(make_server: Make) -> None:
    """Signal every process, as systemd does to a unit's whole control group."""
    server = make_server(step_ms=2)
    stream, data = begin(server, {**LONG, "max_tokens": 300})
    for process in psutil.Process(server.process.pid).children(recursive=True):
        process.terminate()
    server.process.terminate()
    data += rest(stream)
    assert b'"finish_reason":"length"' in data and b"data: [DONE]" in data
    assert server.wait() == 0


def test_requests_that_take_too_long_are_ended_and_told(make_server: Make) -> None:
    server = make_server("--shutdown-timeout", "0.1", step_ms=5)
    stream, data = begin(server, {**LONG, "max_tokens": 2000})
    server.process.send_signal(signal.SIGTERM)
    data += rest(stream)
    assert b'"finish_reason":"abort"' in data and b"data: [DONE]" in data
    assert server.wait() == 1
    assert server.log.endswith("sidestep: the server has ended before 1 of its requests\n")


def test_requests_are_taken_in_the_grace_although_no_client_should_come(make_server: Make) -> None:
    """Take requests of load balancers that have not yet noticed that /ready answers 503."""
    server = make_server("--drain-grace", "3600")
    assert server.http.get("/ready").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    ready = until(lambda: not_ready(server))
    assert ready.json()["error"]["code"] == "draining" and ready.headers["retry-after"] == "1"
    assert server.http.get("/health").status_code == 200
    with httpx2.Client(base_url=server.url, timeout=60) as newcomer:  # over a new connection
        answer = newcomer.post("/v1/completions", json=LONG)
    assert answer.json()["usage"]["completion_tokens"] == 300
    server.process.send_signal(signal.SIGTERM)  # a second signal ends the grace
    assert server.wait() == 0


def test_after_the_grace_new_requests_are_refused_and_running_ones_end(make_server: Make) -> None:
    server = make_server("--drain-grace", "0.3", step_ms=10)
    stream, data = begin(server, LONG)
    server.process.send_signal(signal.SIGTERM)
    refused = until(lambda: not_taken(server))
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "draining"
    data += rest(stream)
    assert b'"finish_reason":"length"' in data and b"data: [DONE]" in data
    assert server.wait() == 0


def test_a_client_that_does_not_read_does_not_hold_up_the_end(make_server: Make) -> None:
    server = make_server("--shutdown-timeout", "0.1", step_ms=1)
    stream, _ = begin(server, {**LONG, "max_tokens": 2000, "n": 64})
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    stream.close()


def test_a_second_signal_ends_it_at_once(make_server: Make) -> None:
    server = make_server(step_ms=50)
    stream, _ = begin(server, {**LONG, "max_tokens": 2000})
    server.process.send_signal(signal.SIGINT)
    until(lambda: not_ready(server))
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    rest(stream)


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_the_engine_s_death_ends_the_server_with_an_error(victim: str, make_server: Make) -> None:
    server = make_server("--restart-limit", "0", step_ms=5)
    core = psutil.Process(server.process.pid).children()[0]
    stream, data = begin(server, {**LONG, "max_tokens": 2000})
    (core if victim == "core" else core.children()[0]).kill()
    data += rest(stream)
    assert b'"code":"engine_dead"' in data and data.rstrip().endswith(b"0")
    assert server.wait() == 1
    assert "the engine has died" in server.log


def test_an_engine_that_stands_still_is_not_healthy(make_server: Make) -> None:
    server = make_server("--stall-limit", "0", step_ms=5)
    core = psutil.Process(server.process.pid).children()[0]
    assert server.http.get("/health").json() == {"status": "ok"}
    core.suspend()
    try:
        answer = server.http.get("/health")
        assert answer.status_code == 503 and "has not answered" in answer.json()["error"]["message"]
    finally:
        core.resume()
    until(lambda: server.http.get("/health").status_code == 200)


def test_a_port_in_use_is_told_before_the_engine_starts(fake: LiveServer, fake_model: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sidestep",
            "serve",
            fake_model,
            "--device",
            "fake",
            "--port",
            str(fake.port),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"sidestep: port: cannot listen at 127.0.0.1:{fake.port}: Address already in use"
    ]


def test_nothing_but_the_server_imports_what_only_it_needs() -> None:
    code = (
        "import sys, sidestep, sidestep.frontend.main as cli, sidestep.frontend.api.async_llm\n"
        "cli.make_parser('x').parse_args(['generate', 'x'])\n"
        "names = ('starlette', 'uvicorn', 'httptools', 'prometheus_client')\n"
        "print([n for n in names if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from sidestep.frontend.main import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "sidestep: starlette is missing; install it: pip install 'sidestep[server]'"
    ]


def test_an_address_of_ipv6(make_server: Make) -> None:
    server = make_server("--host", "::1")
    assert server.url.startswith("http://[::1]:")
    assert server.post("/v1/completions", {"prompt": "hi"}).status_code == 200


def test_version_and_names(fake: LiveServer) -> None:
    import sidestep

    assert fake.http.get("/version").json() == {"version": sidestep.__version__}
    (model,) = fake.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 2048, "model")
