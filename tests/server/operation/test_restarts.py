"""Processes of the engine are killed while clients stream: the streams go on, and miss no token."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from sidestep.executor.runner.fake import expected_tokens
from tests.processes import cores
from tests.server.live import LiveServer, raw_request, read_all, read_until, until

Make = Callable[..., LiveServer]
COUNT = 800
"""Tokens of a stream: as many that none has ended when a process is killed."""


def stream_of(server: LiveServer, stack: ExitStack, prompt: list[int]) -> Any:
    """Return the connection of a stream of COUNT token ids."""
    body = {
        "prompt": prompt,
        "max_tokens": COUNT,
        "ignore_eos": True,
        "stream": True,
        "seed": 5,
        "return_token_ids": True,
    }
    connection = stack.enter_context(server.connect())
    connection.sendall(
        raw_request("/v1/completions", json.dumps(body).encode(), Connection="close")
    )
    return connection


def tokens_in(data: bytes) -> list[int]:
    """Return the tokens of a stream that must have ended well."""
    assert b"data: [DONE]" in data and b"error" not in data, data[-500:]
    tokens: list[int] = []
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or []
    return tokens


def is_restarting(server: LiveServer) -> bool:
    return bool(server.http.get("/health").json().get("restarting_replicas"))


def serves(server: LiveServer) -> bool:
    """Return whether all replicas serve."""
    return bool(server.http.get("/health").json() == {"status": "ok"})


def metrics_of_all(server: LiveServer, options: list[str]) -> dict[str, float]:
    """Return metrics for which all processes of the server have given their figures.

    On a busy machine one of them may be late.
    """
    processes = int(options[-1]) if options else 1

    def of_all() -> dict[str, float] | None:
        found = server.metrics()
        return found if found["sidestep:api_processes"] == processes else None

    return until(of_all)


@pytest.mark.parametrize("victim", ["core", "worker"])
@pytest.mark.parametrize("options", [[], ["--api-server-count", "2"]], ids=["one", "two"])
def test_streams_go_on_after_a_process_of_the_engine_is_killed(
    make_server: Make, options: list[str], victim: str
) -> None:
    server = make_server("--max-num-seqs", "4", *options, step_ms=5)
    prompts = [[i % 5 + 1] * 20 + [i] for i in range(6)]
    vocab = 258
    with ExitStack() as stack:
        streams = [stream_of(server, stack, prompt) for prompt in prompts]
        server.until(lambda load: load["num_running"] == 4)
        begun = [read_until(stream, b"data: ") for stream in streams[:1]]
        (core,) = cores(server.process.pid)
        old = [core, *core.children()]
        (core if victim == "core" else core.children()[0]).kill()
        answers = [read_all(stream) for stream in streams]
        answers[0] = begun[0] + answers[0]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert tokens_in(answer) == expected_tokens(prompt, COUNT, 5, vocab)
    until(lambda: serves(server))
    assert server.http.get("/ready").status_code == 200
    found = metrics_of_all(server, options)
    assert found[f'sidestep:replica_restarts_total{{cause="{victim}"}}'] == 1
    assert found["sidestep:replayed_requests_total"] == 6
    assert found["sidestep:replay_pause_seconds_total"] > 0
    assert found["sidestep:blamed_requests_total"] == found["sidestep:probation_requests"] == 0
    assert found["sidestep:engine_alive"] == 1
    assert not psutil.wait_procs(old, timeout=60)[1]
    server.until_idle()
    assert server.close() == 0


@pytest.mark.parametrize("victim", ["core", "worker"])
@pytest.mark.parametrize("options", [[], ["--api-server-count", "2"]], ids=["one", "two"])
def test_streams_go_on_after_a_process_of_the_engine_is_stopped(
    make_server: Make, options: list[str], victim: str
) -> None:
    server = make_server("--max-num-seqs", "4", "--stall-limit", "6", *options, step_ms=5)
    prompts = [[i % 5 + 1] * 20 + [i] for i in range(6)]
    with ExitStack() as stack:
        streams = [stream_of(server, stack, prompt) for prompt in prompts]
        server.until(lambda load: load["num_running"] == 4)
        (core,) = cores(server.process.pid)
        old = [core, *core.children()]
        (core if victim == "core" else core.children()[0]).suspend()
        until(lambda: server.http.get("/health").status_code == 503)
        answers = [read_all(stream) for stream in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert tokens_in(answer) == expected_tokens(prompt, COUNT, 5, 258)
    until(lambda: serves(server))
    found = metrics_of_all(server, options)
    assert found['sidestep:replica_restarts_total{cause="stall"}'] == 1
    assert not psutil.wait_procs(old, timeout=60)[1]
    assert server.close() == 0


def test_a_server_without_a_start_left_says_why_and_ends_with_an_error(make_server: Make) -> None:
    server = make_server("--restart-limit", "1", step_ms=5)
    body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
    cores(server.process.pid)[0].kill()
    until(lambda: serves(server) and cores(server.process.pid))
    with ExitStack() as stack:
        stream = stack.enter_context(server.connect())
        stream.sendall(
            raw_request("/v1/completions", json.dumps({**body, "stream": True}).encode())
        )
        read_until(stream, b"data: ")
        cores(server.process.pid)[0].kill()
        data = read_all(stream)
    assert b'"code":"engine_dead"' in data and b"SIGKILL" in data
    assert server.wait() == 1
    assert "started again 1 times in 10 minutes" in server.log


def has_new_core(server: LiveServer, old: list[psutil.Process]) -> bool:
    """Return whether all replicas serve, one of them with another core than before."""
    now = cores(server.process.pid)
    return len(now) == len(old) and now != old and serves(server)


def test_operators_see_a_restart(make_server: Make) -> None:
    server = make_server("-dp", "2", step_ms=5)
    for _ in range(2):
        old = cores(server.process.pid)
        old[1].kill()
        until(functools.partial(has_new_core, server, old))
    cores(server.process.pid)[1].kill()  # the third start comes after 30 seconds
    until(lambda: is_restarting(server))
    health = server.http.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "restarting"
    cause = health.json()["restarting_replicas"]["1"]
    assert "was killed" in cause
    assert server.http.get("/ready").status_code == 200
    assert server.metrics()['sidestep:engine_alive{engine="1"}'] == 0
    assert server.http.get("/v1/flight").json()["replicas"][1]["restarting"] == cause
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.close() == 0
    assert not psutil.wait_procs(children, timeout=60)[1]
