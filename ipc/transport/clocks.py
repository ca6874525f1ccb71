"""Times in messages between hosts, whose monotonic clocks have nothing in common.

Messages leave with times that are relative to the moment of sending, and get back the form of the
receiver's clock when they arrive. So a time is late by the time of transport, and nothing more.
Records of steps and requests are older than their message: for these, an offset is measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque

import msgspec

from sidestep.ipc.transport.black_box import NotedRequest, Recorded
from sidestep.ipc.transport.messages import AddRequest, Answer, Outputs, ToCore, ToFrontend
from sidestep.ipc.transport.records import RequestRecord, StepRecord

replace = msgspec.structs.replace
_MOST_SAMPLES = 16
_STEP_TIMES = (
    "ready_ns",
    "schedule_ns",
    "submit_ns",
    "received_ns",
    "launched_ns",
    "start_ns",
    "end_ns",
    "taken_ns",
    "told_ns",
)
"""The fields of StepRecord that are points in time."""
_FLIGHT_TIMES = ("ready_ns", "schedule_ns", "submit_ns")
_REQUEST_TIMES = ("arrival_ns", "queued_ns", "scheduled_ns", "first_token_ns", "finished_ns")


def moved_to_core(message: ToCore, seconds: float) -> ToCore:
    """Return a message to a core with its times moved.

    seconds: minus the sender's time when it leaves, the receiver's time when it arrives.
    """
    if not isinstance(message, AddRequest):
        return message
    deadline = None if message.deadline is None else message.deadline + seconds
    return replace(message, arrival=message.arrival + seconds, deadline=deadline)


def moved_to_frontend(message: ToFrontend, seconds: float) -> ToFrontend:
    """Return a message to a frontend with its times moved."""
    if isinstance(message, Answer) and message.now_ns is None:
        return replace(message, now_ns=time.monotonic_ns())
    if not isinstance(message, Outputs) or not message.started:
        return message
    started = [replace(each, scheduled=each.scheduled + seconds) for each in message.started]
    return replace(message, started=started)


def moved_step(record: StepRecord, ns: int) -> StepRecord:
    """Return a record of a step with its times moved."""
    return dataclasses.replace(record, **{name: getattr(record, name) + ns for name in _STEP_TIMES})


def moved_request(record: RequestRecord, ns: int) -> RequestRecord:
    """Return a record of a request with its times moved."""
    times = {name: getattr(record, name) for name in _REQUEST_TIMES}
    moved = {name: time + ns for name, time in times.items() if time is not None}
    return replace(record, **moved)


def moved_notes(notes: Recorded, ns: int) -> Recorded:
    """Return a core's notes with their times moved."""
    flights = [
        flight._replace(**{name: getattr(flight, name) + ns for name in _FLIGHT_TIMES})
        for flight in notes.flights
    ]
    return Recorded(
        [moved_step(step, ns) for step in notes.steps],
        flights,
        [_moved_noted(request, ns) for request in notes.requests],
    )


def _moved_noted(request: NotedRequest, ns: int) -> NotedRequest:
    scheduled = None if request.scheduled_ns is None else request.scheduled_ns + ns
    return replace(request, arrival_ns=request.arrival_ns + ns, scheduled_ns=scheduled)


class ClockOffset:
    """The offset between two monotonic clocks, measured by questions and their answers.

    The other clock is read somewhere between the question and its answer, so the middle is wrong by
    half of the time between them at most. The quickest of the last answers counts.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_MOST_SAMPLES)

    def __repr__(self) -> str:
        return f"ClockOffset({self.ns} ns)"

    def answered(self, sent_ns: int, their_ns: int, now_ns: int) -> None:
        """Take an answer in which the other side has told its time."""
        self._samples.append((now_ns - sent_ns, their_ns - (sent_ns + now_ns) // 2))

    @property
    def ns(self) -> int:
        """The other clock minus this one, in nanoseconds; 0 before the first answer."""
        return min(self._samples)[1] if self._samples else 0
