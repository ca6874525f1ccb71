"""What people are told of requests: their lives, and what keeps them waiting."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.engine_core.scheduler import Scheduler
from sidestep.ipc.records import RequestRecord
from tests.fakes import Clock, Engine, make_request, make_scheduler


def records(scheduler: Scheduler) -> dict[str, RequestRecord]:
    return {record.request_id: record for record in scheduler.request_records()}


def test_a_request_s_life_is_recorded() -> None:
    clock = Clock()
    clock.now = 1.0
    engine = Engine(make_scheduler(clock=clock))
    engine.scheduler.add(make_request([1, 2, 3], 2, arrival=0.5))
    waiting = records(engine.scheduler)["request 0"]
    assert (waiting.status, waiting.arrival_ns, waiting.queued_ns) == ("waiting", int(0.5e9), int(1e9))
    assert waiting.scheduled_ns is waiting.first_token_ns is waiting.finished_ns is waiting.finish_reason is None
    for _ in range(2):
        clock.now += 1
        engine.launch()
    running = records(engine.scheduler)["request 0"]
    assert (running.status, running.waiting_for, running.scheduled_ns) == ("running", None, int(2e9))
    while engine.num_in_flight:
        clock.now += 1
        engine.take()
    ended = records(engine.scheduler)["request 0"]
    assert (ended.status, ended.first_token_ns, ended.finished_ns) == ("finished", int(4e9), int(5e9))
    assert (ended.finish_reason, ended.num_output_tokens, ended.num_prompt_tokens) == ("length", 2, 3)


@pytest.mark.parametrize(("options", "prompt", "reason"), [
    ({"max_num_seqs": 1}, [5], "max_num_seqs"),
    ({"num_blocks": 3, "max_model_len": 12}, [5] * 8, "kv_cache"),
    ({"budget": 4, "max_num_seqs": 4}, [5], "max_num_batched_tokens")], ids=str)
def test_what_the_next_request_waits_for_is_said(options: dict[str, Any], prompt: list[int], reason: str) -> None:
    engine = Engine(make_scheduler(**options))
    engine.scheduler.add(make_request([1, 2, 3, 4, 5], 4, handle=0))
    engine.launch()
    engine.scheduler.add(make_request(prompt, 4, handle=1))
    engine.scheduler.add(make_request([7], 4, handle=2))
    found = records(engine.scheduler)
    assert (found["request 1"].waiting_for, found["request 2"].waiting_for) == (reason, "turn")


def test_requests_that_are_aborted_are_recorded_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request([1, 2], 4))
    scheduler.abort(0, [0])
    record = records(scheduler)["request 0"]
    assert (record.status, record.finish_reason, record.scheduled_ns) == ("finished", "abort", None)
