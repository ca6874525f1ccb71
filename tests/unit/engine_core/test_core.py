"""The core's turn.

The device gets its step before any output is sent, and the gauges are right.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import pytest

from sidestep.engine_core.core import EngineCore
from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.executor.base import Answered, Executor, StepFailed, WorkerReady
from sidestep.executor.runner.fake import FakeRunner, expected_tokens
from sidestep.ipc.transport.messages import AbortRequests, Answer, Call, unpack_ids
from sidestep.ipc.transport.records import unpack_requests, unpack_steps
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from sidestep.ipc.transport.worker_calls import AnyCall, CallResult
from tests.fakes import SPEC, VOCAB_SIZE, Clock, make_request, make_runner, make_scheduler


class HandExecutor(Executor):
    """Run steps on the fake device; an output is there when the test says so."""

    runner: FakeRunner

    def __init__(self) -> None:
        self.submitted: list[StepInput] = []
        self.done: deque[StepOutput | StepFailed] = deque()
        self.num_resets = 0
        self._running: deque[StepOutput] = deque()
        self.called: list[AnyCall] = []
        self.answered: list[Answered] = []
        self.is_killed = False

    def launch(self) -> None:
        pass

    def start(self) -> WorkerReady:
        raise AssertionError("a core is given workers that have started")

    def submit(self, step: StepInput) -> None:
        self.submitted.append(step)
        self._running.append(self.runner.execute(step).wait())

    def submit_masks(self, masks: StepMasks) -> None:
        raise AssertionError("no request here has a grammar")

    def finish_step(self) -> None:
        self.done.append(self._running.popleft())

    def fail_step(self, cause: Literal["oom", "exception"] = "exception", slot: int = -1) -> None:
        """Let the oldest step in flight fail, and lose the ones behind it."""
        failed = self._running[0].step_id
        self._running.clear()
        self.done.append(StepFailed(step_id=failed, cause=cause, text="worker 0 failed", slot=slot))

    def reset(self) -> None:
        self.runner.reset()
        self.num_resets += 1

    def poll(self) -> StepOutput | StepFailed | None:
        return self.done.popleft() if self.done else None

    def call(self, call: AnyCall) -> int:
        self.called.append(call)
        return len(self.called) - 1

    def answer(self, number: int, *results: CallResult, error: str | None = None) -> None:
        """Let all ranks answer a call. error: the refusal of one rank that has no result."""
        refused = error is not None
        self.answered.append(
            Answered(number, [*results, *[CallResult()] * refused], error, int(refused))
        )

    def take_answered(self) -> list[Answered]:
        answered, self.answered = self.answered, []
        return answered

    def missing_ranks(self, number: int) -> str:
        return "worker 1"

    def fileno(self) -> int:
        return -1

    def worker_pids(self) -> list[int]:
        return []

    def kill(self) -> None:
        self.is_killed = True

    def shutdown(self) -> None:
        pass


def make_core(depth: int = 2) -> tuple[EngineCore, HandExecutor, Clock]:
    clock, executor = Clock(), HandExecutor()
    scheduler = make_scheduler(clock=clock, overlap=depth == 2)
    executor.runner = make_runner(scheduler)
    core = EngineCore(
        scheduler, executor, RequestChecks(SPEC), max_steps_in_flight=depth, clock=clock
    )
    return core, executor, clock


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_are_in_flight_as_allowed(depth: int) -> None:
    core, executor, _ = make_core(depth)
    core.handle(make_request([1, 2, 3], 9))
    core.step()
    assert len(executor.submitted) == core.in_flight == depth
    executor.finish_step()
    core.step()
    assert len(executor.submitted) == depth + 1


def test_a_request_runs_to_its_end_and_every_token_is_told_once() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 6))
    tokens, finished = [], 0
    for _ in range(20):
        for client, outputs in core.step():
            assert client == 0
            tokens += unpack_ids(outputs.token_ids).tolist()
            finished += len(outputs.finished)
        if core.in_flight:
            executor.finish_step()
    assert tokens == expected_tokens([1, 2, 3], 6, 0, VOCAB_SIZE) and finished == 1
    assert core.in_flight == 0 and core.step() == []


def test_steps_that_give_nothing_to_tell_still_lead_to_the_next() -> None:
    core, executor, _ = make_core(depth=1)
    core.handle(make_request([1] * 200, 1))  # several chunks of prompt
    for expected in range(1, 5):
        core.step()
        assert len(executor.submitted) == expected
        executor.finish_step()


def test_aborting_the_last_request_lets_the_pipeline_run_dry() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 50))
    core.step()
    core.handle(AbortRequests(client=0, handles=[0]))
    for _ in range(2):
        executor.finish_step()
        assert all(not outputs.handles for _, outputs in core.step())
    assert core.in_flight == 0 and core.scheduler.kv.pool.num_used == 0


def test_progress_is_measured_while_something_is_in_flight() -> None:
    core, executor, clock = make_core()
    clock.now = 5.0
    assert core.seconds_since_progress() == 0.0
    core.handle(make_request([1, 2, 3], 2))
    core.step()
    clock.now = 8.0
    answer = core.handle(Call(client=0, call_id=7, method="ping"))
    assert answer == Answer(call_id=7, result={"seconds_since_progress": 3.0})
    executor.finish_step()
    executor.finish_step()
    core.step()
    assert core.seconds_since_progress() == 0.0


def test_an_unknown_call_is_answered_with_an_error() -> None:
    core, _, _ = make_core()
    answer = core.handle(Call(client=0, call_id=1, method="dance"))
    assert answer is not None and answer.error == "method: unknown call 'dance'"


def test_the_records_of_steps_and_requests_can_be_asked_for() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 3))
    for _ in range(3):
        core.step()
        executor.finish_step()
    core.step()
    answer = core.handle(Call(client=0, call_id=1, method="step_records", since=1))
    assert answer is not None
    assert [(r.step_id, r.num_tokens, r.num_sampled) for r in unpack_steps(answer.records)] == [
        (1, 1, 1),
        (2, 1, 1),
    ]
    answer = core.handle(Call(client=0, call_id=2, method="request_records"))
    assert answer is not None
    (record,) = unpack_requests(answer.records)
    assert (record.request_id, record.status, record.num_output_tokens) == (
        "request 0",
        "finished",
        3,
    )
