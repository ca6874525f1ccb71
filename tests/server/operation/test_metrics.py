"""The interface for operators: /metrics and /v1/load."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidestep.ipc.transport.records import STEP_KINDS, WAIT_REASONS
from tests.server.live import ROOT, LiveServer, raw_request

Make = Callable[..., LiveServer]
TAILS = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "postponed_tokens",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_params_n",
    "device_busy_seconds",
    "device_idle_seconds",
    "frontend_cpu_seconds",
    "frontend_tokens",
    "queue_wait_seconds",
    "step_time_seconds",
    "tenant_requests",
    "tenant_requests_running",
]


def test_the_names_that_dashboards_of_vllm_use_are_there(fake: LiveServer) -> None:
    answer = fake.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {f"sidestep:{tail}" for tail in TAILS} <= families


def test_requests_and_tokens_are_counted(make_server: Make) -> None:
    server = make_server()
    before = server.metrics()
    body = {"prompt": "x" * 40, "max_tokens": 7, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", {**body, "stream": True, "n": 2}).status_code == 200
    assert server.post("/v1/completions", {"prompt": 1}).status_code == 400
    assert server.http.get("/made/up").status_code == 404
    after = server.metrics()

    def grown(name: str) -> float:
        return after[f"sidestep:{name}"] - before.get(f"sidestep:{name}", 0)

    assert grown('request_success_total{finished_reason="length"}') == 3
    assert grown("prompt_tokens_total") == 80 and grown("generation_tokens_total") == 21
    assert grown("prefix_cache_queries_total") == 80, (
        "a prompt is looked up once for all its choices"
    )
    assert grown("prompt_tokens_cached_total") == grown("prefix_cache_hits_total") > 0
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_generation_tokens",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert grown(f"{name}_count") == after[f'sidestep:{name}_bucket{{le="+Inf"}}'] == 3
    assert grown("request_generation_tokens_sum") == 21
    # The gaps are those between tokens of streamed answers. Tokens that come with the first one
    # have no visible gap.
    assert 0 < grown("inter_token_latency_seconds_count") <= 2 * 6
    assert grown("inter_token_latency_seconds_sum") <= grown("request_decode_time_seconds_sum")
    assert grown('request_params_n_bucket{le="1.0"}') == 1 and grown("request_params_n_sum") == 3
    assert grown('http_responses_total{path="/v1/completions",status="200"}') == 2
    assert grown('http_responses_total{path="/v1/completions",status="400"}') == 1
    assert grown('http_responses_total{path="other",status="404"}') == 1
    assert grown("device_busy_seconds_total") > 0 and grown("engine_steps_total") > 0
    assert grown("frontend_cpu_seconds_total") > 0
    assert after["sidestep:num_requests_running"] == after["sidestep:kv_cache_usage_perc"] == 0


SPECULATION = {
    "method": "synthetic",
    "num_speculative_tokens": 3,
    "synthetic_acceptance_rate": 1.0,
    "adaptive": False,
}


def test_drafts_are_counted_for_the_engine_and_for_each_answer(make_server: Make) -> None:
    server = make_server("--speculative-config", json.dumps(SPECULATION))
    # The prompt's step gives one token, and three steps give four tokens each.
    body = {"prompt": "x" * 40, "max_tokens": 13, "ignore_eos": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["completion_tokens"] == 13
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 9,
        "rejected_prediction_tokens": 0,
    }
    found = server.metrics()
    for name, value in (
        ("num_drafts_total", 3),
        ("num_draft_tokens_total", 9),
        ("num_accepted_tokens_total", 9),
        *((f'num_accepted_tokens_per_pos_total{{position="{i}"}}', 3) for i in range(3)),
        ("draft_length", 3),
        ("acceptance_length", 4),
    ):
        assert found[f"sidestep:spec_decode_{name}"] == value, name
    (step,) = server.http.get("/v1/flight", params={"since": 1}).json()["steps"][:1]
    assert (step["num_sampled"], step["num_draft_tokens"], step["num_accepted_tokens"]) == (1, 3, 3)


def test_without_speculation_no_metric_and_no_answer_tells_of_drafts(fake: LiveServer) -> None:
    usage = fake.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).json()["usage"]
    assert "completion_tokens_details" not in usage
    assert not any("spec_decode" in name for name in fake.metrics())


def test_buckets_are_cumulative(fake: LiveServer) -> None:
    fake.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    prefix = "sidestep:time_to_first_token_seconds_bucket"
    buckets = [value for name, value in fake.metrics().items() if name.startswith(prefix)]
    assert buckets == sorted(buckets) and buckets[-1] >= 1


def test_steps_are_counted_by_kind_and_tokens_as_they_come(make_server: Make) -> None:
    server = make_server(step_ms=2)
    assert (
        server.post(
            "/v1/completions", {"prompt": "x" * 20, "max_tokens": 6, "ignore_eos": True}
        ).status_code
        == 200
    )
    server.until_idle()
    found = server.metrics()
    counts = {
        kind: found[f'sidestep:step_time_seconds_count{{kind="{kind}"}}'] for kind in STEP_KINDS
    }
    assert counts == {"prompt": 1, "decode": 5, "mixed": 0}
    assert found['sidestep:step_time_seconds_sum{kind="decode"}'] == pytest.approx(
        5 * 0.002, rel=0.01
    )
    assert found["sidestep:device_busy_seconds_total"] == pytest.approx(6 * 0.002, rel=0.01)
    assert found["sidestep:frontend_tokens_total"] == 6


def test_the_time_in_the_queue_has_reasons(make_server: Make) -> None:
    server = make_server("--max-num-seqs", "1", step_ms=2)
    body = json.dumps(
        {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    ).encode()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.connect()).sendall(raw_request("/v1/completions", body))
        # The cause of a wait counts from the first step that leaves the request waiting; clients
        # wait for that long.
        server.until(lambda _: waits(server)["max_num_seqs"] > 0 < waits(server)["turn"])
    server.until_idle()
    assert waits(server)["kv_cache"] == waits(server)["output"] == 0


def waits(server: LiveServer) -> dict[str, float]:
    """Return the seconds of waiting by reason."""
    found = server.metrics()
    return {
        reason: found[f'sidestep:queue_wait_seconds_total{{reason="{reason}"}}']
        for reason in WAIT_REASONS
    }


def test_tenants_are_counted_and_their_keys_are_not_told(make_server: Make) -> None:
    keys = ["first-key", "second-key"]
    server = make_server(
        environment={"SIDESTEP_API_KEYS": ",".join(keys), "SIDESTEP_OPERATOR_KEYS": "boss"},
        key="boss",
    )
    body = {"prompt": "x" * 10, "max_tokens": 3, "ignore_eos": True}
    for key, count in zip(keys, (1, 2), strict=True):
        for _ in range(count):
            assert (
                server.post("/v1/completions", body, authorization=f"Bearer {key}").status_code
                == 200
            )
    found = server.metrics()
    for key, count in zip(keys, (1, 2), strict=True):
        digest = hashlib.sha256(key.encode()).hexdigest()
        label = f'{{tenant="{digest[:8]}"}}'
        assert found[f"sidestep:tenant_requests_total{label}"] == count
        assert found[f"sidestep:tenant_prompt_tokens_total{label}"] == 10 * count
        assert found[f"sidestep:tenant_generation_tokens_total{label}"] == 3 * count
        assert found[f"sidestep:tenant_requests_running{label}"] == 0
        text = server.http.get("/metrics").text
        assert key not in text and digest[:9] not in text


# The dashboard.

DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "sidestep.json").read_text())
QUERIES = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


def test_every_query_of_the_dashboard_is_of_what_is_exported(make_server: Make) -> None:
    server = make_server(
        "--max-num-queued-reqs", "1", "--speculative-config", json.dumps(SPECULATION)
    )
    assert server.post("/v1/completions", {"prompt": ["x", "y", "z"]}).status_code == 429
    assert (
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True}).status_code
        == 200
    )
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    kinds = {sample.name: family.type for family in families for sample in family.samples}
    labels = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    assert len(QUERIES) > 35
    for title, query in QUERIES:
        names = re.findall(r"sidestep:\w+", query)
        grouped = {
            label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
        }
        rated = set(re.findall(r"rate\((sidestep:\w+)", query))
        assert names and query.count("(") == query.count(")"), title
        for name in names:
            assert name in kinds, f"{title}: {name}"
            assert grouped | {"model_name"} <= labels[name], f"{title}: {name}"
            assert (kinds[name] != "gauge") == (name in rated), f"{title}: {name}"


def test_the_dashboard_shows_each_panel_once_and_none_over_another() -> None:
    positions = [
        (p["gridPos"]["x"] + dx, p["gridPos"]["y"] + dy)
        for p in DASHBOARD["panels"]
        for dx in range(p["gridPos"]["w"])
        for dy in range(p["gridPos"]["h"])
    ]
    assert len(positions) == len(set(positions)) and max(x for x, _ in positions) == 23
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(values) == len(set(values))
