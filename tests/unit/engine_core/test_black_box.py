"""The memory of a core's notes: what a reader finds there, whenever the core stopped to write."""

from __future__ import annotations

import msgspec

from sidestep.engine_core.requests.request_notes import RequestNotes
from sidestep.ipc.transport.black_box import BlackBox
from sidestep.ipc.transport.messages import AbortRequests, CallWorkers
from sidestep.ipc.transport.worker_calls import Sleep, WakeUp
from tests.fakes import make_request
from tests.unit.engine_core.test_core import make_core
from tests.unit.engine_core.test_flight_recorder import Flight as Run


def test_the_steps_in_flight_are_those_that_are_not_back() -> None:
    box = BlackBox.private(4)
    assert box.read() == ([], [], [])
    for number in range(200):
        box.submitted(number, tuple(range(10)), 2)
        assert [each.step_id for each in box.read().flights] == list(range(number + 1))[-2:]


def test_the_recorder_s_ring_is_read_as_the_recorder_reads_it() -> None:
    run = Run(capacity=4)
    for number in range(7):
        run.submit(number + 0.2)
        run.submit(number + 0.3) if not number else None
        run.take(number + 0.4, number + 0.5, number + 0.6)
        run.recorder.turn_ended()
    found = run.recorder._box.read()
    assert [step.step_id for step in found.steps] == [3, 4, 5, 6]
    assert [each.step_id for each in found.flights] == [7]
    assert found.steps[-1].num_running == found.flights[0].num_running == 4


def test_requests_are_there_from_their_arrival_to_the_end_of_their_last_choice() -> None:
    core, executor, clock = make_core()
    box = core.recorder._box

    def names() -> list[str]:
        return sorted(request.request_id for request in box.read().requests)

    for number, (name, count) in enumerate((("short", 2), ("long", 9), ("äö" * 99, 9))):
        message = make_request([1, 2, 3], count, handle=10 * number, n=1 + number)
        core.handle(msgspec.structs.replace(message, request_id=name))
    cut = "äö" * 20
    assert names() == sorted(["short", "long", cut])
    assert all(request.scheduled_ns is None for request in box.read().requests)
    clock.now = 5.0
    core.step()
    begun = {r.request_id: r.scheduled_ns for r in box.read().requests}
    assert begun["short"] == 5_000_000_000
    core.handle(AbortRequests(client=0, handles=[20, 21]))
    assert cut in names()
    core.handle(AbortRequests(client=0, handles=[22]))
    assert cut not in names()
    for _ in range(30):
        core.step()
        if core.in_flight:
            executor.finish_step()
    assert names() == [] and len(core.notes) == 0


def test_what_a_frontend_leaves_behind_is_forgotten() -> None:
    core, _, _ = make_core()
    core.handle(make_request([1, 2], 9, handle=1))
    core.client_left(0)
    assert core.recorder._box.read().requests == []


def test_requests_beyond_the_room_are_not_noted_and_change_nothing() -> None:
    notes = RequestNotes(box := BlackBox.private(4))
    del notes._free[2:]
    for handle in range(4):
        notes.came(make_request([1], 1, handle=handle))
    assert len(box.read().requests) == len(notes) == 2
    for handle in range(4):
        notes.end(0, handle)
    assert box.read().requests == []


def test_a_request_that_waits_for_a_call_has_one_entry() -> None:
    core, executor, _ = make_core()
    core.handle(CallWorkers(client=0, call_id=1, call=Sleep(level=1), wait_s=10.0))
    core.handle(make_request([1, 2], 2, handle=1))
    core.step()
    executor.answer(0, {"freed_bytes": 1})
    core.step()
    core.handle(CallWorkers(client=0, call_id=2, call=WakeUp(), wait_s=10.0))
    core.step()
    assert len(core.notes) == 1
    executor.answer(1, {})
    for _ in range(9):
        core.step()
        if core.in_flight:
            executor.finish_step()
    assert core.recorder._box.read().requests == [] and len(core.notes) == 0
