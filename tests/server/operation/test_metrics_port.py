"""Metrics for programs without a key, and under the names that endpoint pickers know."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.common.errors import ValidationError
from tests.server.live import LiveServer, raw_request, read_until, until

Make = Callable[..., LiveServer]
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def metrics_of(server: LiveServer) -> httpx2.Client:
    """Return a client of the server's second port."""
    found = re.search(r"metrics at (\S+)/metrics", server.log)
    assert found is not None, server.log
    return httpx2.Client(base_url=found[1], timeout=60)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return name -> labels and value of each sample."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics_and_probes_need_no_key_at_their_own_port(make_server: Make) -> None:
    server = make_server("--metrics-port", "0", environment={"SIDESTEP_API_KEYS": "a"}, key="a")
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200
    assert httpx2.get(f"{server.url}/metrics").status_code == 401
    with metrics_of(server) as http:
        counted = samples(http.get("/metrics").raise_for_status().text)
        assert [value for _, value in counted["sidestep:tenant_requests_total"]] == [1.0]
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        # The model cannot be used there.
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 404
        assert http.get("/v1/flight").status_code == 404
        assert http.get("/").status_code == 404
    assert server.close() == 0


def test_the_port_of_metrics_answers_until_a_drain_is_over(make_server: Make) -> None:
    server = make_server("--metrics-port", "0", step_ms=10)
    with metrics_of(server) as http, server.connect() as stream:
        stream.sendall(raw_request("/v1/completions", json.dumps(LONG).encode()))
        read_until(stream, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/ready").status_code == 503)
        running = samples(http.get("/metrics").text)["sidestep:num_requests_running"]
        assert [value for _, value in running] == [1.0]
    assert server.wait() == 0


def test_the_port_of_metrics_shows_all_processes(make_server: Make) -> None:
    server = make_server("--metrics-port", "0", "--api-server-count", "2")
    with metrics_of(server) as http:
        counted = samples(http.get("/metrics").raise_for_status().text)
        assert [value for _, value in counted["sidestep:api_processes"]] == [2.0]
    assert server.close() == 0


def test_without_the_option_there_is_no_such_port(fake: LiveServer) -> None:
    assert "metrics at" not in fake.log
    assert "vllm:" not in fake.http.get("/metrics").text


@pytest.mark.parametrize("port", [8000, -1, 65536])
def test_the_port_of_metrics_is_another_one(port: int) -> None:
    with pytest.raises(ValidationError, match="metrics_port"):
        ServerArgs(port=8000, metrics_port=port)


def test_endpoint_pickers_find_the_names_of_vllm(make_server: Make) -> None:
    """Export the gauges that the endpoint picker of Kubernetes' gateways reads by default."""
    server = make_server(
        *("--metrics-compat", "vllm", "-dp", "2", "--num-kv-blocks", "100", "--block-size", "16"),
        step_ms=10,
    )
    with server.connect() as stream:
        stream.sendall(raw_request("/v1/completions", json.dumps(LONG).encode()))
        read_until(stream, b"data: ")
        found = samples(server.http.get("/metrics").text)
    for tail in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"vllm:{tail}"] == found[f"sidestep:{tail}"]
    assert sorted(value for _, value in found["vllm:num_requests_running"]) == [0.0, 1.0]
    infos = found["vllm:cache_config_info"]
    assert [
        (labels["engine"], labels["block_size"], labels["num_gpu_blocks"], value)
        for labels, value in infos
    ] == [("0", "16", "100", 1.0), ("1", "16", "100", 1.0)]
    # There are no adapters, so nothing is said about them.
    assert "vllm:lora_requests_info" not in found
