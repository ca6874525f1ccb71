"""The engine's memory of its last steps, and the gauge of the device's idle time with its causes.

Everything is written when a step comes back, once a step, into a ring of fixed size. The ring is in
memory that outlives the core (ipc/transport/black_box.py). Nothing here decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sidestep.ipc.transport.black_box import CAPACITY, BlackBox
from sidestep.ipc.transport.records import STEP_KINDS, STEP_ROW, step_kind
from sidestep.ipc.transport.step import StepOutput


class IdleTime(NamedTuple):
    """Nanoseconds for which the device stood still before a step, by cause."""

    no_work: int
    result: int
    schedule: int
    prepare: int


def idle_before(previous_end: int, work: int, ready: int, submitted: int, start: int) -> IdleTime:
    """Divide the time from one step's end to the next one's start, and return the parts.

    The parts follow one another, as far as they lie in that time: until there was work; until the
    core had what it needed to schedule; until the step was submitted; until it ran. All times are
    in nanoseconds.
    """
    until_work = min(max(work, previous_end), start)
    until_ready = min(max(ready, until_work), start)
    until_submitted = min(max(submitted, until_ready), start)
    # The device's times are less exact than the host's: a step may seem to begin before the last
    # one ends.
    return IdleTime(
        max(0, until_work - previous_end),
        max(0, until_ready - until_work),
        max(0, until_submitted - until_ready),
        max(0, start - max(until_submitted, previous_end)),
    )


class Situation(NamedTuple):
    """Sizes of a step, and of what ran and waited when it had been scheduled."""

    num_rows: int
    num_tokens: int
    num_entered: int
    num_prompts: int
    num_running: int
    num_waiting: int
    num_free_blocks: int


class _Flying(NamedTuple):
    """A step that is not back yet. Times are in nanoseconds."""

    situation: Situation
    work: int
    ready: int
    schedule: int
    submit: int


_NOT_IDLE = IdleTime(0, 0, 0, 0)


def _samples(output: StepOutput) -> tuple[int, int, int]:
    """Return the rows that sampled, the drafts that they verified, and how many they accepted."""
    if not len(output.num_drafts):
        return len(output.token_ids), 0, 0
    rows = len(output.sizes)
    return rows, int(output.num_drafts.sum()), len(output.token_ids) - rows


class FlightRecorder:
    """Records each event that the core reports, in order."""

    def __init__(
        self,
        clock: Callable[[], float],
        capacity: int = CAPACITY,
        box: BlackBox | None = None,
    ) -> None:
        """Begin with an empty ring.

        clock: returns seconds, on the clock that the worker's times are of. capacity: steps that
        are kept. box: where they are kept; in this process's own memory if not given.
        """
        self._clock = clock
        self._capacity = capacity
        self._box = BlackBox.private(capacity) if box is None else box
        self._ring = self._box.steps
        self._num_rows = 0
        self._num_submitted = 0
        self._flying: deque[_Flying] = deque()
        self._taken: list[tuple[StepOutput, _Flying, int, IdleTime]] = []
        self._has_work = False
        self._work = self._ready = self._schedule = self._submit = 0
        self._last_end: int | None = None
        self.busy_ns = 0
        self.idle = [0, 0, 0, 0]
        """Sums of IdleTime's parts, in nanoseconds."""
        self._steps = {kind: [0, 0] for kind in STEP_KINDS}
        """Steps of each kind that have come back, and nanoseconds for which the device ran them."""

    def __repr__(self) -> str:
        return f"FlightRecorder({self._num_rows} steps, {len(self._flying)} in flight)"

    def _now(self) -> int:
        return int(self._clock() * 1e9)

    # Events, in the order of a turn.

    def request_came(self) -> None:
        """Note that there is work."""
        if not self._has_work:
            self._has_work = True
            self._work = self._ready = self._now()

    def output_taken(self, output: StepOutput) -> None:
        """Note that the oldest step is back."""
        now = self._ready = self._now()
        flying = self._flying.popleft()
        busy = output.end_ns - output.start_ns
        self.busy_ns += busy
        kind = self._steps[step_kind(flying.situation.num_rows, flying.situation.num_prompts)]
        kind[0] += 1
        kind[1] += busy
        idle = _NOT_IDLE
        if self._last_end is not None and output.start_ns > self._last_end:
            idle = idle_before(
                self._last_end, flying.work, flying.ready, flying.submit, output.start_ns
            )
            for cause, length in enumerate(idle):
                self.idle[cause] += length
        self._last_end = output.end_ns
        self._taken.append((output, flying, now, idle))

    def taken_back(self, step_id: int) -> None:
        """Note that all steps that are not back, the first of which is `step_id`, will not come.

        They are written as steps without tokens that have taken no time.
        """
        now = self._now()
        for number, flying in enumerate(self._flying, step_id):
            nothing = StepOutput(number, now, now, np.empty(0, np.int32))
            nothing.received_ns = nothing.launched_ns = now
            self._taken.append((nothing, flying, now, _NOT_IDLE))
        self._flying.clear()
        self._ready = now

    def scheduling(self) -> None:
        """Note that the core begins to schedule."""
        self._schedule = self._now()

    def scheduled(self) -> None:
        """Note that the core has scheduled, and sends the step if there is one."""
        self._submit = self._now()

    def submitted(self, situation: Situation) -> None:
        """Note that the step is sent."""
        self._flying.append(
            _Flying(situation, self._work, self._ready, self._schedule, self._submit)
        )
        # Steps are submitted in the order of their numbers, and the first is 0.
        fields = (*situation, self._ready, self._schedule, self._submit)
        self._box.submitted(self._num_submitted, fields, len(self._flying))
        self._num_submitted += 1

    def turn_ended(self) -> None:
        """Write the rows of the steps that came back in this turn.

        Their outputs are ready to be sent. The device has its next steps, or nothing to do.
        """
        if not self._flying:
            self._has_work = False
        if self._taken:
            now = self._now()
            for output, (situation, _, ready, schedule, submit), taken, idle in self._taken:
                rows, tokens, entered, prompts, *around = situation
                STEP_ROW.pack_into(
                    self._ring,
                    self._num_rows % self._capacity * STEP_ROW.size,
                    output.step_id,
                    rows,
                    tokens,
                    entered,
                    prompts,
                    *_samples(output),
                    *around,
                    ready,
                    schedule,
                    submit,
                    output.received_ns,
                    output.launched_ns,
                    output.start_ns,
                    output.end_ns,
                    taken,
                    now,
                    *idle,
                )
                self._num_rows += 1
            self._taken.clear()
            self._box.came_back(self._num_rows, len(self._flying))

    # Reading.

    def records(self, since: int = 0) -> bytes:
        """Return the remembered steps from number `since` on, oldest first, as rows of STEP_ROW."""
        # Steps come back in the order of their numbers, none is left out, and the first is 0.
        oldest = max(0, self._num_rows - self._capacity, since)
        count = max(0, self._num_rows - oldest)
        first = oldest % self._capacity * STEP_ROW.size
        wanted = count * STEP_ROW.size
        rest = max(0, first + wanted - len(self._ring))
        return bytes(self._ring[first : first + wanted]) + bytes(self._ring[:rest])

    def stats(self) -> dict[str, float]:
        """Return seconds since the start, and the number and device seconds of steps by kind."""
        kinds = {f"{kind}_steps": float(count) for kind, (count, _) in self._steps.items()}
        kinds |= {f"{kind}_step_s": length / 1e9 for kind, (_, length) in self._steps.items()}
        no_work, result, schedule, prepare = (length / 1e9 for length in self.idle)
        return {
            "device_busy_s": self.busy_ns / 1e9,
            "device_idle_s": result + schedule + prepare,
            "device_idle_result_s": result,
            "device_idle_schedule_s": schedule,
            "device_idle_prepare_s": prepare,
            "device_no_work_s": no_work,
            **kinds,
        }
