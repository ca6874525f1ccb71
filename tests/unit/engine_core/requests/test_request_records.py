"""Records of requests: their lives, and the causes of their waits."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.ipc.transport.records import RequestRecord, step_kind
from tests.fakes import Clock, Engine, make_request, make_scheduler


def records(scheduler: Scheduler) -> dict[str, RequestRecord]:
    return {record.request_id: record for record in scheduler.request_records()}


def test_a_request_s_life_is_recorded() -> None:
    clock = Clock()
    clock.now = 1.0
    engine = Engine(make_scheduler(clock=clock))
    engine.scheduler.add(make_request([1, 2, 3], 2, arrival=0.5))
    waiting = records(engine.scheduler)["request 0"]
    assert (waiting.status, waiting.arrival_ns, waiting.queued_ns) == (
        "waiting",
        int(0.5e9),
        int(1e9),
    )
    assert waiting.scheduled_ns is waiting.first_token_ns is waiting.finished_ns is None
    assert waiting.finish_reason is None
    for _ in range(2):
        clock.now += 1
        engine.launch()
    running = records(engine.scheduler)["request 0"]
    assert (running.status, running.waiting_for, running.scheduled_ns) == (
        "running",
        None,
        int(2e9),
    )
    while engine.num_in_flight:
        clock.now += 1
        engine.take()
    ended = records(engine.scheduler)["request 0"]
    assert (ended.status, ended.first_token_ns, ended.finished_ns) == (
        "finished",
        int(4e9),
        int(5e9),
    )
    assert (ended.finish_reason, ended.num_output_tokens, ended.num_prompt_tokens) == (
        "length",
        2,
        3,
    )


@pytest.mark.parametrize(
    ("options", "prompt", "reason"),
    [
        ({"max_num_seqs": 1}, [5], "max_num_seqs"),
        ({"num_blocks": 3, "max_model_len": 12}, [5] * 8, "kv_cache"),
        ({"budget": 4, "max_num_seqs": 4}, [5], "max_num_batched_tokens"),
    ],
    ids=str,
)
def test_what_the_next_request_waits_for_is_said(
    options: dict[str, Any], prompt: list[int], reason: str
) -> None:
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


def test_a_limit_bounds_each_state_and_keeps_the_next_request() -> None:
    engine = Engine(make_scheduler(max_num_seqs=3))
    for handle in range(4):
        engine.scheduler.add(make_request([1], 1, handle=handle))
    engine.run()
    for handle in range(4, 12):
        engine.scheduler.add(make_request([handle], 4, handle=handle))
    engine.launch()
    found = engine.scheduler.request_records(limit=2)
    assert [(r.request_id, r.status, r.waiting_for) for r in found] == [
        ("request 2", "finished", None),
        ("request 3", "finished", None),
        ("request 4", "running", None),
        ("request 5", "running", None),
        ("request 7", "waiting", "max_num_seqs"),
        ("request 8", "waiting", "turn"),
    ]
    assert len(engine.scheduler.request_records()) == 12


@pytest.mark.parametrize(
    ("options", "prompt", "reason"),
    [
        ({"max_num_seqs": 1}, [5], "max_num_seqs"),
        ({"num_blocks": 3, "max_model_len": 12}, [5] * 8, "kv_cache"),
        ({"budget": 4, "max_num_seqs": 4}, [5] * 6, "max_num_batched_tokens"),
    ],
    ids=str,
)
def test_the_time_in_the_queue_is_counted_by_reason(
    options: dict[str, Any], prompt: list[int], reason: str
) -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock, **options))
    engine.scheduler.add(make_request([1] * 8, 4, handle=0))
    engine.launch()
    engine.scheduler.add(make_request(prompt, 4, handle=1))
    engine.scheduler.add(make_request([7], 4, handle=2))
    engine.scheduler.add(make_request([8], 4, handle=3))
    engine.launch()
    before = engine.scheduler.stats()
    clock.now += 3
    engine.scheduler.abort(0, [3])
    clock.now += 2
    engine.run()
    after = engine.scheduler.stats()
    waited = {name: after[name] - before[name] for name in after if name.startswith("queue_wait_")}
    assert {name: seconds for name, seconds in waited.items() if seconds} == {
        f"queue_wait_{reason}_s": 5.0,
        "queue_wait_turn_s": 2 * 3.0 + 2.0,
    }


def test_the_reasons_add_up_to_what_the_requests_have_waited() -> None:
    clock = Clock()
    engine = Engine(
        make_scheduler(clock=clock, num_blocks=12, max_num_seqs=3, budget=8, max_model_len=40)
    )
    for handle in range(12):
        clock.now += 0.25
        engine.scheduler.add(make_request([handle] * (1 + handle), 6, handle=handle))
        engine.turn()
    while engine.turn():
        clock.now += 1
    stats = engine.scheduler.stats()
    assert (
        stats["num_preemptions"] == 0
    )  # a preempted request has waited twice, and its record has the first time alone
    ended = engine.scheduler.request_records()
    waited = sum((r.scheduled_ns or 0) - r.queued_ns for r in ended) / 1e9
    assert waited > 0
    assert sum(s for name, s in stats.items() if name.startswith("queue_wait_")) == pytest.approx(
        waited
    )


def test_steps_are_told_apart_by_what_they_do() -> None:
    engine = Engine(make_scheduler())
    kinds = []

    def launch() -> None:
        assert engine.launch()
        situation = engine.scheduler.situation()
        kinds.append(step_kind(situation.num_rows, situation.num_prompts))

    engine.scheduler.add(make_request([1, 2, 3], 4, handle=0))
    launch()
    launch()
    engine.scheduler.add(make_request([1, 2, 3, 4, 5], 4, handle=1))
    engine.take()
    launch()
    assert kinds == ["prompt", "decode", "mixed"]


def test_a_preempted_request_has_waited_since_it_was_preempted() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock, num_blocks=5, max_model_len=20))
    for handle in range(2):
        engine.scheduler.add(make_request([handle] * 5, 12, handle=handle))

    def waited() -> float:
        return sum(
            value
            for name, value in engine.scheduler.stats().items()
            if name.startswith("queue_wait")
        )

    while not engine.scheduler.stats()["num_preemptions"]:
        engine.launch()
        engine.take()
        clock.now += 100
    assert waited() == 0, "both entered at once"
    clock.now += 1
    engine.launch()
    assert waited() == 101, "since it was preempted, and no longer"
