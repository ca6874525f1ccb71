"""/v1/flight: the data of the live view."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from sidestep.frontend.server.observe.window import Percentiles, Window, percentiles
from sidestep.frontend.server.operation.flight import MOST_REQUESTS, MOST_STEPS
from tests.server.live import LiveServer, raw_request

Make = Callable[..., LiveServer]


def flight(server: LiveServer, since: int | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = (
        server.http.get("/v1/flight", params={} if since is None else {"since": since})
        .raise_for_status()
        .json()
    )
    return answer


def generate(server: LiveServer, tokens: int) -> None:
    body = {"prompt": "x" * 20, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body).status_code == 200


def test_each_answer_goes_on_where_the_last_one_ended(make_server: Make) -> None:
    server = make_server(step_ms=2)
    empty = flight(server)
    assert (empty["steps"], empty["next"], empty["ttft_s"]["count"]) == ([], 0, 0)
    generate(server, 5)
    server.until_idle()
    first = flight(server, empty["next"])
    assert [step["step"] for step in first["steps"]] == list(range(first["next"]))
    assert (first["steps"][0]["kind"], first["steps"][0]["num_tokens"]) == ("prompt", 20)
    assert {step["kind"] for step in first["steps"][1:]} == {"decode"}
    for step in first["steps"]:
        times = [
            step[f"{name}_us"]
            for name in ("schedule", "submit", "received", "start", "end", "taken", "told")
        ]
        assert times == sorted(times) and times[-1] <= first["now_us"]
        assert step["end_us"] - step["start_us"] == pytest.approx(2000, abs=1)
    # Tokens that reach the server together have one gap here; the metric counts each.
    assert first["ttft_s"]["count"] == 1 and 1 <= first["itl_s"]["count"] <= 4
    assert server.metrics()["sidestep:inter_token_latency_seconds_count"] == 4
    assert 0 < first["itl_s"]["p50"] <= first["itl_s"]["p99"]
    assert flight(server, first["next"])["steps"] == []
    generate(server, 3)
    server.until_idle()
    assert flight(server, first["next"])["steps"][0]["step"] == first["next"]


def test_who_waits_is_told_with_the_reason(make_server: Make) -> None:
    server = make_server("--max-num-seqs", "1", step_ms=5)
    long = json.dumps(
        {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    ).encode()
    with ExitStack() as stack:
        for _ in range(MOST_REQUESTS + 10):
            stack.enter_context(server.connect()).sendall(raw_request("/v1/completions", long))
        server.until(lambda load: load["num_waiting"] == MOST_REQUESTS + 9)
        told = flight(server)
        assert [r["waiting_for"] for r in told["requests"]] == [
            None,
            "max_num_seqs",
            *["turn"] * (MOST_REQUESTS - 1),
        ]
        assert (told["num_running"], told["num_waiting"]) == (1, MOST_REQUESTS + 9)
        assert 0 < told["kv_cache_usage"] < 1


def test_an_answer_is_bounded_and_has_the_newest_steps(make_server: Make) -> None:
    server = make_server(step_ms=0.1)
    generate(server, MOST_STEPS + 50)
    server.until_idle()
    told = flight(server, 0)
    numbers = [step["step"] for step in told["steps"]]
    assert len(numbers) <= MOST_STEPS and numbers == list(
        range(told["next"] - len(numbers), told["next"])
    )
    assert told["next"] > MOST_STEPS


def test_a_number_of_an_engine_before_this_one_begins_anew(make_server: Make) -> None:
    server = make_server()
    generate(server, 4)
    server.until_idle()
    told = flight(server, 10**9)
    assert len(told["steps"]) == told["next"] > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Percentiles(0, None, None, None)),
        ([3.0], Percentiles(1, 3.0, 3.0, 3.0)),
        (list(range(100)), Percentiles(100, 50, 90, 99)),
        (list(range(1000, -1, -1)), Percentiles(100, 50, 90, 99)),
    ],
)
def test_percentiles_are_of_the_last_values(values: list[float], expected: Percentiles) -> None:
    window = Window(100)
    for value in values:
        window.add(value)
    assert percentiles(window.values()) == expected


@pytest.mark.parametrize(
    "query",
    [
        "since=",
        "since=-1",
        "since=x",
        "since=1.5",
        "since=1&since=2",
        "sincere=1",
        "since=" + "9" * 19,
        "since=%D9%A1",
    ],
)
def test_a_query_that_is_none_is_refused(query: str, fake: LiveServer) -> None:
    answer = fake.http.get(f"/v1/flight?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("since", "sincere")
