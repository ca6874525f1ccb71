"""The engine core: the Scheduler and the Executor, with two steps in flight.

While the device computes step N, step N+1 is already scheduled, encoded and queued behind it. When
N's tokens come back, N+2 is scheduled while N+1 runs. In a pipeline each stage computes a step, and
one more is queued. Without overlap the same loop allows one step less in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.engine_core.progress import Progress, WorkersStalledError
from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.engine_core.requests.request_notes import RequestNotes
from sidestep.engine_core.scheduling.flight_recorder import FlightRecorder
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.soft_resets import SoftResets
from sidestep.engine_core.worker_calls import WorkerCalls
from sidestep.executor.base import Executor, StepFailed
from sidestep.ipc.common.errors import EngineDeadError, ValidationError
from sidestep.ipc.processes.core_args import OWNER
from sidestep.ipc.transport.black_box import BlackBox
from sidestep.ipc.transport.envelope import Refused, Subject, envelope_of, handles_of
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    CallWorkers,
    CancelCall,
    Outputs,
    WorkersChanged,
)
from sidestep.ipc.transport.records import pack_requests
from sidestep.ipc.transport.step import StepInput

logger = logging.getLogger(__name__)


class EngineCore:
    """The synchronous core of the engine: it owns no socket and no clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        checks: RequestChecks,
        *,
        max_steps_in_flight: int,
        clock: Callable[[], float],
        progress: Progress | None = None,
        box: BlackBox | None = None,
    ) -> None:
        """Begin without requests.

        progress: that of the workers; without a limit if not given. box: where steps and requests
        are noted, for whoever outlives the core.
        """
        box = box or BlackBox.private()
        self.scheduler = scheduler
        self.executor = executor
        self._checks = checks
        self._depth = max_steps_in_flight
        self._in_flight = 0
        self._progress = progress or Progress(0.0, clock)
        self.recorder = FlightRecorder(clock, box=box)
        self.notes = RequestNotes(box)
        self._resets = SoftResets()
        self.calls = WorkerCalls(
            executor,
            lambda: not (self._in_flight or scheduler.has_unfinished),
            scheduler.reset_prefix_cache,
            clock,
        )
        self._answers: list[tuple[int, Answer | WorkersChanged]] = []
        self._made: list[tuple[int, Outputs]] = []
        """The outputs of the turn so far."""

    def __repr__(self) -> str:
        return f"EngineCore({self.scheduler!r}, in_flight={self._in_flight})"

    @property
    def in_flight(self) -> int:
        """Steps that are submitted and whose output has not come back."""
        return self._in_flight

    def handle(
        self, message: AddRequest | AbortRequests | Call | CallWorkers | CancelCall | Refused
    ) -> Answer | None:
        """Take a message of a frontend, and return the answer if it is a call that has one already.

        A message that cannot be taken ends its own request or call with an error, and nothing else.
        """
        if isinstance(message, Refused):
            return self._refuse(message)
        try:
            return self._take(message)
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, ValidationError):
                logger.exception("a message of frontend %d could not be taken", message.client)
            problem = f"the engine could not take the message: {error}"
            return self._refuse(Refused(message.client, envelope_of(message), problem))

    def _take(
        self, message: AddRequest | AbortRequests | Call | CallWorkers | CancelCall
    ) -> Answer | None:
        if isinstance(message, AddRequest):
            self._checks.check_request(message)
            if self.scheduler.knows(message.client, handles_of(message)):
                raise ValidationError("handle", f"{message.handle} is in use")
            self.notes.came(message)
            if not self.calls.hold(message):
                self.recorder.request_came()
                self.scheduler.add(message)
        elif isinstance(message, AbortRequests):
            self.calls.hold(message)
            self.scheduler.abort(message.client, message.handles)
            for handle in message.handles:
                self.notes.end(message.client, handle)
        elif isinstance(message, CallWorkers):
            self._checks.check_call(message)
            self.calls.ask(message)
        elif isinstance(message, CancelCall):
            self.calls.cancel(message.client, message.call_id)
        else:
            return self._answer(message)
        return None

    def _refuse(self, refused: Refused) -> Answer | None:
        """End what a message is about, with an error."""
        client, envelope, problem = refused
        logger.warning("frontend %d: %s", client, problem)
        if envelope.subject is Subject.CALL:
            return Answer(call_id=envelope.number, error=problem)
        if envelope.subject is Subject.REQUEST:
            self.scheduler.refuse(client, envelope.handles, problem)
        return None

    def client_left(self, client: int) -> None:
        """End all that a frontend has asked for, since it has left."""
        self.calls.client_left(client)
        self.scheduler.abort_client(client)
        self.notes.client_left(client)

    def step(self) -> list[tuple[int, Outputs]]:
        """Run one turn of the loop, without waiting, and return the outputs by client.

        After a turn nothing can be done until a frontend, a worker or a deadline calls.
        """
        outputs = self._made = list[tuple[int, Outputs]]()
        # 1. Take the tokens of the steps that have come back, and the answers to calls.
        while (output := self.executor.poll()) is not None:
            if isinstance(output, StepFailed):
                self._reset(output)
                continue
            self._in_flight -= 1
            self._progress.output_taken()
            self.recorder.output_taken(output)
            # 2. The newest step may be waiting for what those tokens allow: that comes before all
            #    else.
            self.scheduler.follow(output)
            self._send_masks()
            outputs += self.scheduler.update(output).items()
        if self._in_flight:
            self._look_at_workers()
        # 3. Send the next call of a frontend, and take the requests that have waited for calls.
        if self.calls.has_any:
            answers = self.calls.turn()
            if (change := self.calls.take_change()) is not None:  # known before the caller goes on
                self._answers.append((OWNER, change))
            self._answers += answers
            for message in self.calls.take_held():
                self.handle(message)
        # 4. Queue the next step behind it. The outputs go out after this: the device comes first.
        while self._in_flight < self._depth and (step := self._schedule()) is not None:
            if self._in_flight == 0:
                self._progress.began()
            self.executor.submit(step)
            self.recorder.submitted(self.scheduler.situation())
            self._in_flight += 1
            self._send_masks()
        # 5. Add what ended outside a step: refusals, deadlines.
        outputs += self.scheduler.take_outputs().items()
        for client, made in outputs:
            self.notes.take(client, made)
        self.recorder.turn_ended()
        return outputs

    def _reset(self, failed: StepFailed) -> None:
        """Take back the steps in flight, the oldest of which has failed, and go on.

        Raises EngineDeadError where that has not helped before.
        """
        next_step = self.scheduler.take_back(failed)
        self._resets.count(failed, next_step)
        self.executor.reset()
        self.recorder.taken_back(failed.step_id)
        self._in_flight = 0

    def take_started(self) -> list[tuple[int, Outputs]]:
        """Return which requests have begun, by client, where `step` has raised before it said it.

        A frontend must know them: they may be the cause.
        """
        begun = [
            (client, Outputs(handles=b"", token_ids=b"", started=outputs.started))
            for client, outputs in [*self._made, *self.scheduler.take_outputs().items()]
            if outputs.started
        ]
        for client, outputs in begun:
            self.notes.take(client, outputs)
        return begun

    def take_answers(self) -> list[tuple[int, Answer | WorkersChanged]]:
        """Return the answers to calls to the workers, and news of what they changed, by client."""
        answers, self._answers = self._answers, []
        return answers

    def next_deadline(self) -> float | None:
        """Return the latest time of the next turn, on the core's clock; None for no limit."""
        times = (
            self.scheduler.next_deadline(),
            self.calls.next_deadline(),
            self._progress.next_look if self._in_flight else None,
            self.executor.next_look() if self._in_flight else None,
        )
        return min((time for time in times if time is not None), default=None)

    def seconds_since_progress(self) -> float:
        """Return the seconds for which the steps in flight have made no progress; see progress.py.

        0 when no step is in flight, and while the workers have time for a call: steps wait then.
        """
        if not self._in_flight:
            return 0.0
        self._progress.look(counts=not self.calls.is_busy)
        return self._progress.silent_s

    def _look_at_workers(self) -> None:
        """Kill workers that hang. Raises WorkersStalledError, which ends the core, too."""
        self._progress.look(counts=not self.calls.is_busy)
        if (problem := self._progress.problem) is not None:
            self.executor.kill()
            raise WorkersStalledError(problem)

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
        elif call.method == "idle":
            result = {"idle": float(not (self._in_flight or self.scheduler.has_unfinished))}
        elif call.method == "stats":
            result = self.scheduler.stats() | self.recorder.stats() | self._resets.stats()
            result["num_waiting"] += self.calls.num_held
            result["num_refused_peers"] = float(self.executor.num_refused())
        elif call.method == "sleep_level":
            result = {"level": float(self.calls.sleep_level)}
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
