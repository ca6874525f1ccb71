"""What operators read: /metrics and /v1/load."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import LiveServer

Make = Callable[..., LiveServer]
TAILS = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "request_prompt_tokens",
    "request_generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_params_n", "device_busy_seconds", "device_idle_seconds", "frontend_cpu_seconds"]


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
    assert grown("prefix_cache_queries_total") == 80, "a prompt is looked up once for all its choices"
    assert grown("prompt_tokens_cached_total") == grown("prefix_cache_hits_total") > 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_generation_tokens", "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert grown(f"{name}_count") == after[f'sidestep:{name}_bucket{{le="+Inf"}}'] == 3
    assert grown("request_generation_tokens_sum") == 21
    assert grown("inter_token_latency_seconds_count") == 2 * 6  # of the streamed ones, between their tokens
    assert grown("inter_token_latency_seconds_sum") <= grown("request_decode_time_seconds_sum")
    assert grown('request_params_n_bucket{le="1.0"}') == 1 and grown("request_params_n_sum") == 3
    assert grown('http_responses_total{path="/v1/completions",status="200"}') == 2
    assert grown('http_responses_total{path="/v1/completions",status="400"}') == 1
    assert grown('http_responses_total{path="other",status="404"}') == 1
    assert grown("device_busy_seconds_total") > 0 and grown("engine_steps_total") > 0
    assert grown("frontend_cpu_seconds_total") > 0
    assert after["sidestep:num_requests_running"] == after["sidestep:kv_cache_usage_perc"] == 0


def test_buckets_are_cumulative(fake: LiveServer) -> None:
    fake.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    prefix = "sidestep:time_to_first_token_seconds_bucket"
    buckets = [value for name, value in fake.metrics().items() if name.startswith(prefix)]
    assert buckets == sorted(buckets) and buckets[-1] >= 1
