"""Calls to the workers, in the core: their order, time limits, and the requests that wait."""

from __future__ import annotations

import pytest

from sidestep.engine_core.core import EngineCore
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.transport.messages import (
    AbortRequests,
    Answer,
    Call,
    CallWorkers,
    CancelCall,
    WorkersChanged,
    unpack_ids,
)
from sidestep.ipc.transport.worker_calls import (
    AnyCall,
    ApplyWeights,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)
from tests.fakes import VOCAB_SIZE, make_request
from tests.unit.engine_core.test_core import HandExecutor, make_core

PROFILE = StartProfile(folder="/somewhere")


def ask(core: EngineCore, call: AnyCall, call_id: int = 0, client: int = 0) -> None:
    core.handle(CallWorkers(client=client, call_id=call_id, call=call, wait_s=10.0))


def turn(core: EngineCore) -> list[tuple[int, Answer]]:
    core.step()
    made = core.take_answers()
    return [(client, answer) for client, answer in made if isinstance(answer, Answer)]


def run(core: EngineCore, executor: HandExecutor, turns: int = 30) -> list[int]:
    """Run the steps of all requests, and return the tokens that were told."""
    tokens: list[int] = []
    for _ in range(turns):
        for _, outputs in core.step():
            tokens += unpack_ids(outputs.token_ids).tolist()
        if core.in_flight:
            executor.finish_step()
    return tokens


def fall_asleep(core: EngineCore, executor: HandExecutor, level: int = 1) -> None:
    ask(core, Sleep(level=level), call_id=90)
    core.step()
    executor.answer(len(executor.called) - 1, {"freed_bytes": 1})
    assert [answer.error for _, answer in turn(core)] == [None]


def test_a_call_goes_behind_the_steps_in_flight_and_stops_none() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 9))
    core.step()
    ask(core, PROFILE)
    core.step()
    assert executor.called == [PROFILE] and len(executor.submitted) == 2
    executor.finish_step()
    core.step()
    assert len(executor.submitted) == 3, "steps go on while the workers have a call"


def test_the_caller_is_answered_when_all_ranks_have_answered() -> None:
    core, executor, _ = make_core()
    ask(core, PROFILE, call_id=7, client=3)
    assert turn(core) == []
    executor.answer(0, {"file": "a"}, {"file": "b"})
    assert turn(core) == [(3, Answer(call_id=7, results=[{"file": "a"}, {"file": "b"}]))]
    assert turn(core) == []


def test_calls_are_sent_one_at_a_time_in_their_order() -> None:
    core, executor, _ = make_core()
    ask(core, PROFILE, 1)
    ask(core, StopProfile(), 2, client=1)
    core.step()
    assert executor.called == [PROFILE]
    executor.answer(0, {}, error="start_profile: no room")
    assert turn(core) == [(0, Answer(call_id=1, results=[{}, {}], error="start_profile: no room"))]
    assert executor.called == [PROFILE, StopProfile()]


def test_ranks_that_do_not_answer_in_time_are_named_and_the_next_call_is_sent() -> None:
    core, executor, clock = make_core()
    ask(core, PROFILE, 1)
    ask(core, StopProfile(), 2)
    core.step()
    assert core.next_deadline() == PROFILE.timeout_s
    clock.now = PROFILE.timeout_s
    error = "start_profile: worker 1 did not answer in 60 s"
    assert turn(core) == [(0, Answer(call_id=1, error=error))]
    assert executor.called == [PROFILE, StopProfile()]
    executor.answer(0, {})
    assert turn(core) == [], "nobody waits for the late answer"
    executor.answer(1, {})
    assert [answer.call_id for _, answer in turn(core)] == [2]


def test_steps_that_wait_behind_a_call_count_as_progress_until_its_time_is_over() -> None:
    core, _, clock = make_core()
    core.handle(make_request([1, 2, 3], 9))
    core.step()
    ask(core, PROFILE)
    core.step()
    clock.now = PROFILE.timeout_s - 1
    core.step()
    assert core.seconds_since_progress() == 0.0
    clock.now = PROFILE.timeout_s
    core.step()
    assert core.seconds_since_progress() == 0.0
    clock.now += 1.5
    assert core.seconds_since_progress() == 1.5


def test_sleep_is_sent_when_all_requests_have_ended_and_drops_the_cached_prefixes() -> None:
    core, executor, _ = make_core()
    prompt = list(range(1, 30))
    core.handle(make_request(prompt, 5))
    core.step()
    ask(core, Sleep(level=1))
    core.step()
    assert executor.called == []
    assert run(core, executor) == expected_tokens(prompt, 5, 0, VOCAB_SIZE)
    assert executor.called == [Sleep(level=1)]
    assert core.scheduler.kv.pool.num_cached == 0


def test_requests_that_come_for_a_sleeping_engine_run_when_it_is_awake() -> None:
    core, executor, _ = make_core()
    fall_asleep(core, executor)
    core.handle(make_request([4, 5], 5, handle=1))
    core.handle(make_request([6, 7], 5, handle=2))
    core.handle(AbortRequests(client=0, handles=[2]))
    assert run(core, executor) == [] and executor.submitted == []
    answer = core.handle(Call(client=0, call_id=1, method="stats"))
    assert answer is not None and (answer.result or {})["num_waiting"] == 1
    ask(core, WakeUp())
    core.step()
    assert executor.submitted == []
    executor.answer(1, {})
    assert run(core, executor) == expected_tokens([4, 5], 5, 1, VOCAB_SIZE)


def test_requests_behind_a_sleep_wait_too_or_it_would_never_begin() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 5))
    core.step()
    ask(core, Sleep(level=1))
    core.handle(make_request([4, 5], 5, handle=1))
    assert len(run(core, executor)) == 5
    assert executor.called == [Sleep(level=1)]


def test_a_sleep_whose_requests_do_not_end_in_time_is_refused_and_all_goes_on() -> None:
    core, executor, clock = make_core()
    core.handle(make_request([1, 2, 3], 5))
    core.step()
    ask(core, Sleep(level=1), 4)
    core.handle(make_request([4, 5], 5, handle=1))
    core.step()
    assert core.next_deadline() == 10.0
    clock.now = 10.0
    ((_, answer),) = turn(core)
    assert answer.call_id == 4 and "requests still ran after 10 s" in (answer.error or "")
    assert len(run(core, executor)) == 10 and executor.called == []


@pytest.mark.parametrize("leaves", [True, False], ids=["its frontend leaves", "it is cancelled"])
def test_a_sleep_that_nobody_waits_for_does_not_begin(leaves: bool) -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 5, client=1))
    core.step()
    ask(core, Sleep(level=1), 4)
    core.handle(make_request([4, 5], 5, client=1, handle=1))
    if leaves:
        core.client_left(0)
    else:
        core.handle(CancelCall(client=0, call_id=4))
    assert len(run(core, executor)) == 10 and executor.called == []


def test_what_a_frontend_has_left_behind_does_not_run_after_the_sleep() -> None:
    core, executor, _ = make_core()
    fall_asleep(core, executor)
    core.handle(make_request([4, 5], 5, client=1))
    core.client_left(1)
    ask(core, WakeUp())
    core.step()
    executor.answer(1, {})
    assert run(core, executor) == [] and executor.submitted == []


def test_sleep_and_wake_up_that_change_nothing_are_answered_without_the_workers() -> None:
    core, executor, _ = make_core()
    ask(core, WakeUp(), 1)
    assert turn(core) == [(0, Answer(call_id=1))]
    fall_asleep(core, executor)
    ask(core, Sleep(level=1), 2)
    assert turn(core) == [(0, Answer(call_id=2))]
    ask(core, Sleep(level=2), 3)
    ((_, answer),) = turn(core)
    assert answer.error == "sleep: the engine sleeps at level 1; wake it up first"
    assert executor.called == [Sleep(level=1)]


def test_a_sleep_that_one_rank_refuses_is_ended_by_waking_up() -> None:
    core, executor, _ = make_core()
    ask(core, Sleep(level=2))
    core.step()
    executor.answer(0, {"freed_bytes": 1}, error="sleep: no room")
    turn(core)
    core.handle(make_request([4, 5], 5))
    assert run(core, executor) == [], "one rank has no weights"
    ask(core, WakeUp())
    core.step()
    executor.answer(1, {}, {})
    assert len(run(core, executor)) == 5


def test_a_sleep_that_all_ranks_refuse_has_not_happened() -> None:
    core, executor, _ = make_core()
    ask(core, Sleep(level=1))
    core.step()
    executor.answer(0, error="sleep: no room")
    turn(core)
    core.handle(make_request([4, 5], 5))
    assert len(run(core, executor)) == 5


def test_a_sleep_that_comes_late_holds_requests_until_the_engine_is_woken() -> None:
    core, executor, clock = make_core()
    ask(core, Sleep(level=1))
    core.step()
    clock.now = Sleep.timeout_s
    ((_, answer),) = turn(core)
    assert answer.error == "sleep: worker 1 did not answer in 600 s"
    core.handle(make_request([4, 5], 5))
    assert run(core, executor) == []
    ask(core, WakeUp())
    core.step()
    executor.answer(0, {})
    assert turn(core) == []
    executor.answer(1, {})
    assert len(run(core, executor)) == 5


def test_what_calls_change_of_the_workers_is_told_to_who_starts_them_again() -> None:
    core, executor, _ = make_core()
    made: list[object] = []

    def call(number: int, one: AnyCall, client: int) -> None:
        ask(core, one, client=client)
        core.step()
        executor.answer(number, {})
        core.step()
        made.append([(to, m) for to, m in core.take_answers() if isinstance(m, WorkersChanged)])

    call(0, ApplyWeights(folder="/new"), 2)
    call(1, PROFILE, 2)
    call(2, Sleep(level=2), 3)
    call(3, WakeUp(), 0)
    new, asleep = WorkersChanged(weights="/new"), WorkersChanged(sleep_level=2, weights="/new")
    assert made == [[(0, new)], [], [(0, asleep)], [(0, new)]]
