"""The memory in which a core notes its steps and requests, so that they outlive the core.

The frontend that starts a core makes the memory, and reads it after the core's death, however that
came. It has no name, as the rings have none. An entry is written before the counter or the state
that makes it valid, so what a core was writing when it was killed is not read.

A request's entry has its name, its times and its counts; no text and no token.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from sidestep.ipc.transport.records import STEP_ROW, StepRecord
from sidestep.ipc.transport.shm_ring import unnamed_memory

CAPACITY = 8192
"""Steps that are kept."""
MOST_REQUESTS = 4096
"""Requests that can be noted at once; further ones are not."""
_MOST_FLIGHTS = 64
_COUNTERS = struct.Struct("<qqq")
"""Steps that have come back, steps that were submitted, and steps in flight."""
_FLIGHT = struct.Struct("<11q")
_NAME_BYTES = 80
_REQUEST = struct.Struct(f"<7q{_NAME_BYTES}s")
"""State, frontend, choices, tokens of the prompt, arrival, first scheduling, length of the name."""
_INT = struct.Struct("<q")
_SCHEDULED = 5 * _INT.size
"""Place of the first scheduling in a request's entry."""


class Flight(NamedTuple):
    """A step that has been sent to the workers and is not back. Fields as those of StepRecord."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_entered: int
    num_prompts: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    ready_ns: int
    schedule_ns: int
    submit_ns: int


class NotedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a core had and that had not ended."""

    request_id: str
    """Its name, cut to 80 bytes."""
    frontend: int
    """Number of the frontend that sent it, at this core."""
    num_choices: int
    num_prompt_tokens: int
    arrival_ns: int
    """Time of the call that made it."""
    scheduled_ns: int | None
    """Time at which it was scheduled first; None if it waited."""


class Recorded(NamedTuple):
    """All that a core has noted."""

    steps: list[StepRecord]
    """The last steps that came back, oldest first."""
    flights: list[Flight]
    """The steps in flight, oldest first."""
    requests: list[NotedRequest]


class BlackBox:
    """The memory, as its writer and its reader see it."""

    def __init__(self, memory: bytearray | mmap.mmap, capacity: int = CAPACITY) -> None:
        """Use a memory of `size_of(capacity)` bytes. capacity: steps that are kept."""
        self._memory = memory
        self._capacity = capacity
        self._counters = memoryview(memory)[: _COUNTERS.size].cast("q")
        self._flights = _COUNTERS.size
        self._requests = self._flights + _MOST_FLIGHTS * _FLIGHT.size
        first = self._requests + MOST_REQUESTS * _REQUEST.size
        self.steps = memoryview(memory)[first : first + capacity * STEP_ROW.size]
        """The ring of steps, as rows of STEP_ROW."""

    def __repr__(self) -> str:
        rows, submitted, flying = self._counters
        return f"BlackBox({rows} of {submitted} steps are back, {flying} in flight)"

    @staticmethod
    def size_of(capacity: int) -> int:
        """Return the bytes of a memory for this number of steps."""
        requests = MOST_REQUESTS * _REQUEST.size
        flights = _MOST_FLIGHTS * _FLIGHT.size
        return _COUNTERS.size + flights + requests + capacity * STEP_ROW.size

    @classmethod
    def of_descriptor(cls, descriptor: int) -> BlackBox:
        """Use the memory of a descriptor, and close that."""
        with os.fdopen(descriptor, "rb") as file:
            return cls(mmap.mmap(file.fileno(), cls.size_of(CAPACITY)))

    @classmethod
    def private(cls, capacity: int = CAPACITY) -> BlackBox:
        """Return one in memory of this process alone."""
        return cls(bytearray(cls.size_of(capacity)), capacity)

    # Writing.

    def submitted(self, step_id: int, fields: tuple[int, ...], num_flights: int) -> None:
        """Note a step that is sent, and the number of steps in flight with it.

        fields: those of Flight that follow its number.
        """
        at = self._flights + step_id % _MOST_FLIGHTS * _FLIGHT.size
        _FLIGHT.pack_into(self._memory, at, step_id, *fields)
        self._counters[1], self._counters[2] = step_id + 1, num_flights

    def came_back(self, num_rows: int, num_flights: int) -> None:
        """Note that the ring has this number of steps, after the newest has been written."""
        self._counters[0], self._counters[2] = num_rows, num_flights

    def put_request(self, at: int, request: NotedRequest) -> None:
        """Write the entry of a request; at: its index."""
        name = request.request_id.encode()[:_NAME_BYTES]
        fields = (request.frontend, request.num_choices, request.num_prompt_tokens)
        start = self._requests + at * _REQUEST.size
        _REQUEST.pack_into(self._memory, start, 0, *fields, request.arrival_ns, 0, len(name), name)
        _INT.pack_into(self._memory, start, 1)

    def began(self, at: int, scheduled_ns: int) -> None:
        """Note when a request was scheduled first."""
        start = self._requests + at * _REQUEST.size
        _INT.pack_into(self._memory, start + _SCHEDULED, scheduled_ns)

    def remove_request(self, at: int) -> None:
        """Remove the entry of a request."""
        _INT.pack_into(self._memory, self._requests + at * _REQUEST.size, 0)

    # Reading.

    def read(self) -> Recorded:
        """Return what has been noted."""
        rows, submitted, flying = self._counters
        steps = [self._step(number) for number in range(max(0, rows - self._capacity), rows)]
        numbers = range(max(0, submitted - min(flying, _MOST_FLIGHTS)), submitted)
        return Recorded(steps, [self._flight(n) for n in numbers], list(self._each_request()))

    def _step(self, number: int) -> StepRecord:
        at = number % self._capacity * STEP_ROW.size
        return StepRecord(*STEP_ROW.unpack_from(self.steps, at))

    def _flight(self, number: int) -> Flight:
        at = self._flights + number % _MOST_FLIGHTS * _FLIGHT.size
        return Flight(*_FLIGHT.unpack_from(self._memory, at))

    def _each_request(self) -> Iterator[NotedRequest]:
        for at in range(MOST_REQUESTS):
            start = self._requests + at * _REQUEST.size
            if not _INT.unpack_from(self._memory, start)[0]:
                continue
            _, frontend, choices, prompt, arrival, scheduled, length, name = _REQUEST.unpack_from(
                self._memory, start
            )
            yield NotedRequest(
                request_id=name[:length].decode(errors="replace"),
                frontend=frontend,
                num_choices=choices,
                num_prompt_tokens=prompt,
                arrival_ns=arrival,
                scheduled_ns=scheduled or None,
            )


def new_memory() -> int:
    """Return the descriptor of memory for a black box; untouched pages cost nothing."""
    memory = unnamed_memory()
    os.ftruncate(memory, BlackBox.size_of(CAPACITY))
    return memory
