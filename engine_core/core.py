"""The engine core: the Scheduler and the Executor, with two steps in flight.

While the device computes step N, step N+1 is already scheduled, encoded and queued behind it. When
N's tokens come back, N+2 is scheduled while N+1 runs. In a pipeline each stage computes a step, and
one more is queued. Without overlap the same loop allows one step less in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestep.engine_core.scheduling.flight_recorder import FlightRecorder
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.executor.base import Executor
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.transport.messages import AbortRequests, AddRequest, Answer, Call, Outputs
from sidestep.ipc.transport.records import pack_requests
from sidestep.ipc.transport.step import StepInput


class EngineCore:
    """The synchronous core of the engine: it owns no socket and no clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        max_steps_in_flight: int,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._depth = max_steps_in_flight
        self._in_flight = 0
        self._clock = clock
        self._last_progress = clock()
        self.recorder = FlightRecorder(clock)

    def __repr__(self) -> str:
        return f"EngineCore({self.scheduler!r}, in_flight={self._in_flight})"

    @property
    def in_flight(self) -> int:
        """Steps that are submitted and whose output has not come back."""
        return self._in_flight

    def handle(self, message: AddRequest | AbortRequests | Call) -> Answer | None:
        """Take a message of a frontend, and return the answer if the message is a Call."""
        if isinstance(message, AddRequest):
            self.recorder.request_came()
            self.scheduler.add(message)
        elif isinstance(message, AbortRequests):
            self.scheduler.abort(message.client, message.handles)
        else:
            return self._answer(message)
        return None

    def step(self) -> list[tuple[int, Outputs]]:
        """Run one turn of the loop, without waiting, and return the outputs by client.

        After a turn nothing can be done until a frontend, a worker or a deadline calls.
        """
        outputs: list[tuple[int, Outputs]] = []
        # 1. Take the tokens of the steps that have come back.
        while self._in_flight and (output := self.executor.poll()) is not None:
            self._in_flight -= 1
            self._last_progress = self._clock()
            self.recorder.output_taken(output)
            # 2. The newest step may be waiting for what those tokens allow: that comes before all
            #    else.
            self.scheduler.follow(output)
            self._send_masks()
            outputs += self.scheduler.update(output).items()
        # 3. Queue the next step behind it. The outputs go out after this: the device comes first.
        while self._in_flight < self._depth and (step := self._schedule()) is not None:
            if self._in_flight == 0:
                self._last_progress = self._clock()
            self.executor.submit(step)
            self.recorder.submitted(self.scheduler.situation())
            self._in_flight += 1
            self._send_masks()
        # 4. Add what ended outside a step: refusals, deadlines.
        outputs += self.scheduler.take_outputs().items()
        self.recorder.turn_ended()
        return outputs

    def seconds_since_progress(self) -> float:
        """Return the seconds since a step in flight last gave an output.

        0 when no step is in flight.
        """
        return self._clock() - self._last_progress if self._in_flight else 0.0

    def _schedule(self) -> StepInput | None:
        self.recorder.scheduling()
        step = self.scheduler.schedule()
        self.recorder.scheduled()
        return step

    def _send_masks(self) -> None:
        """Send the masks of the newest step in flight, before the message of the step behind it.

        Workers read one message after the other.
        """
        masks = self.scheduler.take_masks()
        if masks is not None:
            self.executor.submit_masks(masks)

    def _answer(self, call: Call) -> Answer:
        if call.method == "ping":
            result = {"seconds_since_progress": self.seconds_since_progress()}
        elif call.method == "stats":
            result = self.scheduler.stats() | self.recorder.stats()
        elif call.method == "reset_prefix_cache":
            result = {"done": float(self.scheduler.reset_prefix_cache())}
        elif call.method == "step_records":
            return Answer(call_id=call.call_id, records=self.recorder.records(call.since))
        elif call.method == "request_records":
            return Answer(
                call_id=call.call_id,
                records=pack_requests(self.scheduler.request_records(call.limit)),
            )
        else:
            return Answer(
                call_id=call.call_id,
                error=str(ValidationError("method", f"unknown call {call.method!r}")),
            )
        return Answer(call_id=call.call_id, result=result)
