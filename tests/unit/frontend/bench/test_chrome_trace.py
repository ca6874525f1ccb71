"""The trace that Perfetto shows.

Every span begins and ends as the records say, on the right track.
"""

from __future__ import annotations

import json
from typing import Any

from sidestep.frontend.bench.chrome_trace import (
    CORE,
    DEVICE,
    FRONTEND,
    REQUESTS,
    WORKER,
    chrome_trace,
)
from sidestep.frontend.output.output_processor import Delivery
from sidestep.ipc.transport.records import RequestRecord, StepRecord


def step(number: int, ready: int) -> StepRecord:
    """Return a step whose events come a microsecond after the other."""
    times = [ready + 1000 * i for i in range(9)]
    values = [number, 4, 5, 1, 2, 3, 12, 10, 6, 7, 8, *times, 100, 200, 300, 400]
    return StepRecord(*values)


def request(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "a",
        "client": 0,
        "status": "finished",
        "waiting_for": None,
        "num_prompt_tokens": 9,
        "num_cached_tokens": 0,
        "num_output_tokens": 4,
        "num_preemptions": 0,
        "arrival_ns": 10_000,
        "queued_ns": 11_000,
        "scheduled_ns": 12_000,
        "first_token_ns": 20_000,
        "finished_ns": 30_000,
        "finish_reason": "length",
    }
    return RequestRecord(**{**fields, **changes})


def spans(trace: dict[str, Any], track: int) -> list[tuple[str, float, float]]:
    """Return name, begin and duration in microseconds."""
    return [
        (e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] == track
    ]


def test_each_process_has_a_track_and_each_step_its_spans() -> None:
    trace = chrome_trace(
        [[step(7, 10_000), step(8, 14_000)]],
        [],
        [Delivery(1, 19_000, 21_000, 3), Delivery(0, 0, 1, 1)],
    )
    assert json.loads(json.dumps(trace)) == trace
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {
        FRONTEND: "frontend",
        CORE: "engine core",
        WORKER: "worker 0",
        DEVICE: "device",
        REQUESTS: "requests",
    }
    assert spans(trace, CORE) == [
        ("schedule step 7", 1, 1),
        ("take step 7", 7, 1),
        ("schedule step 8", 5, 1),
        ("take step 8", 11, 1),
    ]
    assert spans(trace, WORKER) == [("prepare step 7", 3, 1), ("prepare step 8", 7, 1)]
    assert spans(trace, DEVICE) == [("step 7", 5, 1), ("step 8", 9, 1)]
    assert spans(trace, FRONTEND) == [("deliver", 9, 2)], (
        "what came before the first step is left out"
    )


def test_a_step_tells_why_the_device_stood_still_before_it() -> None:
    trace = chrome_trace([[step(7, 0)]], [], [])
    (device,) = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == DEVICE]
    assert device["args"]["idle_before_us"] == {
        "no work": 0.1,
        "result": 0.2,
        "schedule": 0.3,
        "prepare": 0.4,
    }
    args = device["args"]
    assert (args["rows"], args["tokens"], args["sampled"]) == (4, 5, 3)
    assert (args["drafted"], args["accepted"]) == (12, 10)


def life(record: RequestRecord) -> list[tuple[str, str, float]]:
    trace = chrome_trace([[step(0, 10_000)]], [record], [])
    return [
        (e["name"], e["ph"], e["ts"])
        for e in trace["traceEvents"]
        if e["pid"] == REQUESTS and e["ph"] in "be"
    ]


def test_a_request_waits_then_computes_its_prompt_then_its_output() -> None:
    assert life(request()) == [
        ("waiting", "b", 0),
        ("waiting", "e", 2),
        ("prompt", "b", 2),
        ("prompt", "e", 10),
        ("output", "b", 10),
        ("output", "e", 20),
    ]


def test_a_request_that_has_not_ended_lasts_to_the_last_step() -> None:
    assert life(request(finished_ns=None, first_token_ns=None)) == [
        ("waiting", "b", 0),
        ("waiting", "e", 2),
        ("prompt", "b", 2),
        ("prompt", "e", 8),
    ]
    assert life(request(finished_ns=None, first_token_ns=None, scheduled_ns=None)) == [
        ("waiting", "b", 0),
        ("waiting", "e", 8),
    ]


def test_requests_that_ended_before_the_first_step_are_left_out() -> None:
    assert life(request(finished_ns=9000)) == []


def test_a_trace_without_steps_is_a_trace() -> None:
    assert chrome_trace([[]], [], [])["traceEvents"]


def test_each_replica_has_tracks_of_its_own() -> None:
    trace = chrome_trace(
        [[step(7, 10_000)], [step(3, 12_000)]], [request(), request(replica=1)], []
    )
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert len(names) == 9 and len(set(names.values())) == 9
    second = next(track for track, name in names.items() if name == "device of replica 1")
    assert spans(trace, DEVICE) == [("step 7", 5, 1)] and spans(trace, second) == [("step 3", 7, 1)]
    assert {names[e["pid"]] for e in trace["traceEvents"] if e["ph"] == "b"} == {
        "requests of replica 0",
        "requests of replica 1",
    }
