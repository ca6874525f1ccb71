"""The flight recorder: the causes of the device's idle time, and the recorded steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engine_core.scheduling.flight_recorder import (
    FlightRecorder,
    IdleTime,
    Situation,
    idle_before,
)
from sidestep.ipc.transport.records import unpack_steps
from sidestep.ipc.transport.step import StepOutput
from tests.fakes import Clock, make_request, make_scheduler

TIMES = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("previous_end", "work", "ready", "submitted", "start", "expected"),
    [
        # Queued behind the step before: no gap.
        (100, 0, 40, 50, 100, IdleTime(0, 0, 0, 0)),
        # Without overlap: the output took 5 to come back, scheduling 7, the way to the device 3.
        (100, 0, 105, 112, 115, IdleTime(0, 5, 7, 3)),
        # The step was scheduled too late, although its request was known before.
        (100, 0, 90, 130, 131, IdleTime(0, 0, 30, 1)),
        # The step was submitted in time, but launched late.
        (100, 0, 50, 60, 120, IdleTime(0, 0, 0, 20)),
        # A request came after a pause.
        (100, 500, 500, 510, 530, IdleTime(400, 0, 10, 20)),
        # The device's clock is a little behind.
        (100, 0, 40, 50, 99, IdleTime(0, 0, 0, 0)),
    ],
)
def test_idle_time_has_causes(
    previous_end: int, work: int, ready: int, submitted: int, start: int, expected: IdleTime
) -> None:
    assert idle_before(previous_end, work, ready, submitted, start) == expected


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_the_causes_add_up_to_the_gap(
    previous_end: int, work: int, ready: int, submitted: int, start: int
) -> None:
    idle = idle_before(previous_end, work, ready, submitted, start)
    parts = (idle.no_work, idle.result, idle.schedule, idle.prepare)
    assert min(parts) >= 0
    assert sum(parts) == max(0, start - previous_end)


class Flight:
    """A recorder, and steps of one row that a test lets pass by."""

    def __init__(self, capacity: int = 8) -> None:
        self.clock = Clock()
        self.recorder = FlightRecorder(self.clock, capacity)
        self._scheduler = make_scheduler()
        self._scheduler.add(make_request([1], 100))
        self._outputs: list[StepOutput] = []

    def submit(self, at: float) -> None:
        self.recorder.scheduling()
        self.clock.now = at
        step = self._scheduler.schedule()
        assert step is not None
        self.recorder.scheduled()
        self.recorder.submitted(Situation(1, 1, 1, 1, 4, 2, 3))
        output = StepOutput(step.step_id, 0, 0, step.slots, received_ns=7, launched_ns=8)
        self._outputs.append(output)

    def take(self, start: float, end: float, at: float) -> None:
        output = self._outputs.pop(0)
        output.start_ns, output.end_ns = int(start * 1e9), int(end * 1e9)
        self.clock.now = at
        self.recorder.output_taken(output)
        self._scheduler.update(output)


def test_a_step_is_remembered_with_all_its_times() -> None:
    flight = Flight()
    flight.clock.now = 1.0
    flight.recorder.request_came()
    flight.clock.now = 2.0
    flight.submit(at=3.0)
    flight.recorder.turn_ended()
    assert unpack_steps(flight.recorder.records()) == []
    flight.take(start=4.0, end=5.0, at=6.0)
    flight.clock.now = 7.0
    flight.recorder.turn_ended()
    (record,) = unpack_steps(flight.recorder.records())
    assert (record.step_id, record.num_rows, record.num_tokens) == (0, 1, 1)
    assert (record.num_entered, record.num_prompts, record.num_sampled, record.kind) == (
        1,
        1,
        1,
        "prompt",
    )
    assert (record.num_draft_tokens, record.num_accepted_tokens) == (0, 0)
    assert (record.num_running, record.num_waiting, record.num_free_blocks) == (4, 2, 3)
    assert (record.received_ns, record.launched_ns) == (7, 8)
    times = [
        record.ready_ns,
        record.schedule_ns,
        record.submit_ns,
        record.start_ns,
        record.end_ns,
        record.taken_ns,
        record.told_ns,
    ]
    assert times == [int(t * 1e9) for t in range(1, 8)]
    assert record.idle_ns == record.idle_no_work_ns == 0, (
        "before the first step there is nothing to compare with"
    )


def test_a_step_with_drafts_tells_rows_apart_from_tokens() -> None:
    recorder = FlightRecorder(Clock())
    recorder.submitted(Situation(3, 3, 0, 0, 3, 0, 9))
    ids = np.arange(6, dtype=np.int32)
    sizes, drafts = np.array([3, 1, 2], np.int32), np.array([2, 0, 3], np.int32)
    recorder.output_taken(StepOutput(0, 1, 2, ids, sizes=sizes, num_drafts=drafts))
    recorder.turn_ended()
    (record,) = unpack_steps(recorder.records())
    assert (record.num_rows, record.num_tokens, record.num_sampled) == (3, 3, 3)
    assert (record.num_draft_tokens, record.num_accepted_tokens) == (5, 3)


def test_the_time_without_work_is_told_from_the_engine_s_own() -> None:
    flight = Flight()
    flight.recorder.request_came()
    flight.submit(at=1.0)
    flight.recorder.turn_ended()
    flight.take(start=1.0, end=2.0, at=2.0)
    flight.recorder.turn_ended()  # nothing in flight: the engine has run dry
    flight.clock.now = 10.0
    flight.recorder.request_came()
    flight.clock.now = 11.0
    flight.submit(at=12.0)
    flight.take(start=15.0, end=16.0, at=17.0)
    flight.submit(at=18.0)
    flight.recorder.turn_ended()
    flight.take(start=19.0, end=20.0, at=20.0)
    flight.recorder.turn_ended()
    _, second, third = unpack_steps(flight.recorder.records())
    seconds = [
        t / 1e9
        for t in (
            second.idle_no_work_ns,
            second.idle_result_ns,
            second.idle_schedule_ns,
            second.idle_prepare_ns,
        )
    ]
    assert seconds == [8.0, 0.0, 2.0, 3.0]
    assert (
        third.idle_no_work_ns,
        third.idle_result_ns,
        third.idle_schedule_ns,
        third.idle_prepare_ns,
    ) == (0, int(1e9), int(1e9), int(1e9))
    assert flight.recorder.stats() == {
        "device_busy_s": 3.0,
        "device_idle_s": 8.0,
        "device_idle_result_s": 1.0,
        "device_idle_schedule_s": 3.0,
        "device_idle_prepare_s": 4.0,
        "device_no_work_s": 8.0,
        "decode_steps": 0.0,
        "decode_step_s": 0.0,
        "prompt_steps": 3.0,
        "prompt_step_s": 3.0,
        "mixed_steps": 0.0,
        "mixed_step_s": 0.0,
    }


@pytest.mark.parametrize("steps", [3, 8, 9, 30])
def test_the_ring_keeps_the_last_steps_in_order(steps: int) -> None:
    flight = Flight(capacity=8)
    for number in range(steps):
        flight.submit(at=number)
        flight.take(start=number, end=number + 1, at=number + 1)
        flight.recorder.turn_ended()
    kept = list(range(max(0, steps - 8), steps))
    assert [r.step_id for r in unpack_steps(flight.recorder.records())] == kept
    assert [r.step_id for r in unpack_steps(flight.recorder.records(since=2))] == [
        n for n in kept if n >= 2
    ]
