"""--data-parallel-size: several replicas.

They are one server to its clients and several to its operators.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.processes import cores
from tests.server.live import LiveServer, raw_request, read_all, until

Make = Callable[..., LiveServer]
SHORT: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}


def test_each_replica_has_its_figures_and_its_flight_recorder(make_server: Make) -> None:
    server = make_server("-dp", "2", "--routing", "round_robin")
    for i in range(4):
        assert server.post("/v1/completions", {**SHORT, "prompt": f"{i}" * 20}).status_code == 200
    server.until_idle()
    found = server.metrics()
    for label in ("", '{engine="1"}'):
        assert found[f"sidestep:engine_alive{label}"] == 1
        assert found[f"sidestep:prefix_cache_queries_total{label}"] == 40
    assert found['sidestep:step_time_seconds_count{engine="1",kind="prompt"}'] == 2
    assert found["sidestep:prompt_tokens_total"] == 80
    for replica in (0, 1):
        told = server.http.get(f"/v1/flight?replica={replica}").json()
        assert (told["replica"], len(told["steps"])) == (replica, told["next"]) and told["next"] > 0
        assert told["replicas"] == [
            {"replica": number, "dead": None, "stalled": None, "restarting": None}
            for number in (0, 1)
        ]
    for query in ("replica=2", "replica=x", "replica=0&replica=1"):
        assert server.http.get(f"/v1/flight?{query}").status_code == 400


def test_a_replica_s_death_breaks_no_answer_and_operators_are_told(make_server: Make) -> None:
    """Run a server of two processes, each of which routes by itself."""
    server = make_server(
        *("--data-parallel-size", "2", "--api-server-count", "2", "--max-num-seqs", "4"),
        *("--restart-limit", "0"),
        step_ms=3,
    )
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        streams = [stack.enter_context(server.connect()) for _ in range(16)]
        for i, stream in enumerate(streams):
            stream.sendall(
                raw_request(
                    "/v1/completions",
                    json.dumps({**body, "prompt": f"{i}" * 20}).encode(),
                    Connection="close",
                )
            )
        server.until(lambda load: load["num_running"] == 8 and load["num_waiting"] == 8)
        cores(server.process.pid)[1].kill()
        answers = [read_all(stream) for stream in streams]
    for answer in answers:
        assert (
            b'"finish_reason":"length"' in answer
            and b"data: [DONE]" in answer
            and b"error" not in answer
        )
    for path in ("/health", "/ready"):
        health = server.http.get(path)
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert (
            "was killed" in health.json()["dead_replicas"]["1"]
            or "has ended" in health.json()["dead_replicas"]["1"]
        )
    found = server.metrics()
    assert found["sidestep:engine_alive"] == 1 and found['sidestep:engine_alive{engine="1"}'] == 0
    assert 'sidestep:num_requests_running{engine="1"}' not in found
    assert server.http.get("/v1/flight?replica=1").status_code == 503
    flight = server.http.get("/v1/flight").json()
    assert flight["replica"] == 0 and flight["replicas"][1]["dead"]
    server.until_idle()
    cores(server.process.pid)[0].kill()
    assert server.wait() == 1
    assert "the engine has died: replica 0: " in server.log and "replica 1: " in server.log


def test_a_replica_that_hangs_takes_nobody_with_it(make_server: Make) -> None:
    """Stop a core: it answers nothing. Operators see that, clients do not."""
    server = make_server("-dp", "2", "--routing", "round_robin", "--stall-limit", "0")
    stuck = cores(server.process.pid)[1]
    stuck.suspend()
    try:
        until(lambda: "1" in server.http.get("/health").json().get("stalled_replicas", {}))
        for i in range(10):
            assert (
                server.post("/v1/completions", {**SHORT, "prompt": f"{i}" * 20}).status_code == 200
            )
        for path, word in (("/health", "degraded"), ("/ready", "degraded")):
            answer = server.http.get(path)
            assert answer.status_code == 200 and answer.json()["status"] == word
        found = server.metrics()
        assert found["sidestep:engine_stalled"] == 0
        assert found['sidestep:engine_stalled{engine="1"}'] == 1
        assert found["sidestep:generation_tokens_total"] == 50
        assert server.http.get("/v1/flight").json()["replica"] == 0
        assert server.http.get("/v1/flight?replica=1").status_code == 503
    finally:
        stuck.resume()
    until(lambda: server.http.get("/health").json() == {"status": "ok"})


def test_a_deadline_and_the_metrics_outlive_an_engine_that_hangs(make_server: Make) -> None:
    server = make_server("--stall-limit", "0")
    (stuck,) = cores(server.process.pid)
    stuck.suspend()
    try:
        answer = server.post("/v1/completions", {**SHORT, "prompt": "ab", "deadline_ms": 50})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        found = server.metrics()
        assert found['sidestep:request_success_total{finished_reason="abort"}'] == 1
        assert "sidestep:num_requests_running" not in found
        assert server.http.get("/ready").status_code == 503
    finally:
        stuck.resume()
    # Until the engine has answered, its load is 503 too.
    until(lambda: server.http.get("/ready").status_code == 200)
    server.until_idle()
