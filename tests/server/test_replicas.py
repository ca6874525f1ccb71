"""--data-parallel-size: several replicas, which are one server to its clients and several to its operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil

from tests.server.live import LiveServer, raw_request, read_all

Make = Callable[..., LiveServer]
SHORT: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}


def cores(server: LiveServer) -> list[psutil.Process]:
    """The replicas', in their order."""
    return [child for child in psutil.Process(server.process.pid).children() if child.cmdline()[-1] == "engine core"]


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
        assert told["replicas"] == [{"replica": 0, "dead": None}, {"replica": 1, "dead": None}]
    for query in ("replica=2", "replica=x", "replica=0&replica=1"):
        assert server.http.get(f"/v1/flight?{query}").status_code == 400


def test_a_replica_s_death_breaks_no_answer_and_operators_are_told(make_server: Make) -> None:
    """Of a server of two processes, each of which routes by itself."""
    server = make_server("--data-parallel-size", "2", "--api-server-count", "2", "--max-num-seqs", "4", step_ms=3)
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        streams = [stack.enter_context(server.connect()) for _ in range(16)]
        for i, stream in enumerate(streams):
            stream.sendall(raw_request("/v1/completions", json.dumps({**body, "prompt": f"{i}" * 20}).encode(),
                                       Connection="close"))
        server.until(lambda load: load["num_running"] == 8 and load["num_waiting"] == 8)
        cores(server)[1].kill()
        answers = [read_all(stream) for stream in streams]
    for answer in answers:
        assert b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer and b"error" not in answer
    for path in ("/health", "/ready"):
        health = server.http.get(path)
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert "was killed" in health.json()["dead_replicas"]["1"] or "has ended" in health.json()["dead_replicas"]["1"]
    found = server.metrics()
    assert found["sidestep:engine_alive"] == 1 and found['sidestep:engine_alive{engine="1"}'] == 0
    assert 'sidestep:num_requests_running{engine="1"}' not in found
    assert server.http.get("/v1/flight?replica=1").status_code == 503
    flight = server.http.get("/v1/flight").json()
    assert flight["replica"] == 0 and flight["replicas"][1]["dead"]
    server.until_idle()
    cores(server)[0].kill()
    assert server.wait() == 1
    assert "the engine has died: replica 0: " in server.log and "replica 1: " in server.log
