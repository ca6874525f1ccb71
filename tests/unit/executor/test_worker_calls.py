"""Calls in a worker: between the right steps, each answered, and refused without harm."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

from sidestep.executor.base import Answered, StepFailed
from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.hosts.rank_answers import RankAnswers
from sidestep.executor.processes import worker as worker_module
from sidestep.executor.processes.worker import Resets, run_steps
from sidestep.executor.processes.worker_orders import Order, Reply
from sidestep.executor.runner.fake import FakeRunner
from sidestep.executor.runner.runner import PendingOutput
from sidestep.executor.runner.worker_calls import CallRefusedError, answer_call
from sidestep.ipc.transport.shm_ring import RingClosed, RingReader, RingWriter, create_ring
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from sidestep.ipc.transport.worker_calls import (
    ALL_CALLS,
    CallAnswer,
    CallResult,
    SentCall,
    StartProfile,
    StopProfile,
    WakeUp,
    WorkerCall,
    decode_answer,
    decode_call,
    encode,
)
from tests.fakes import make_runner, make_scheduler
from tests.unit.executor.steps import Request, make_step


class Diary(FakeRunner):
    """A runner that notes what it does."""

    events: list[str]

    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        self.events.append(f"step {step.step_id}")
        return super().execute(step, receive_masks)

    def start_profile(self, call: StartProfile) -> CallResult:
        self.events.append("start")
        return {"file": call.folder}

    def stop_profile(self, call: StopProfile) -> CallResult:
        raise CallRefusedError("nothing runs")


class Core:
    """The core's ends of a worker's two rings."""

    def __init__(self, steps: RingWriter, replies: RingReader) -> None:
        self._steps, self._replies = steps, replies

    def step(self, step: StepInput) -> None:
        self._steps.send(step.encode(), Order.STEP)

    def masks(self, masks: StepMasks) -> None:
        self._steps.send(masks.encode(), Order.MASKS)

    def reset(self) -> None:
        self._steps.send([], Order.RESET)

    def call(self, number: int, call: StartProfile | StopProfile | WakeUp) -> None:
        self._steps.send([encode(SentCall(number=number, call=call))], Order.CALL)

    def hear(self) -> tuple[int, CallAnswer | StepFailed | int]:
        """Return the kind of the next reply, with the answer, the report or the step's number."""
        assert self._replies.wait(30)
        message = self._replies.receive()
        assert message is not None
        kind, data = message
        if kind == Reply.ANSWER:
            return kind, decode_answer(data)
        if kind == Reply.STEP_FAILED:
            return kind, msgspec.msgpack.decode(data, type=StepFailed)
        if kind == Reply.RESET:
            return kind, -1
        return kind, StepOutput.decode(data).step_id


@contextmanager
def worker(
    runner: FakeRunner, *, answers: bool = True, resets: Resets = Resets.NEVER
) -> Iterator[Core]:
    """Run a worker's loop in a thread, and yield the core's side.

    The loop may end because the core has gone, or by an exception that it does not survive.
    """
    steps, replies = create_ring(1), create_ring(1)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            run_steps(
                runner, RingReader(steps, 0), RingWriter(replies), answers=answers, resets=resets
            )
        except (RingClosed, RuntimeError) as closed:
            ended.append(closed)

    thread = threading.Thread(target=run, name="loop")
    thread.start()
    try:
        yield Core(RingWriter(steps), RingReader(replies, 0))
    finally:
        os.close(steps.bells_out[0])
        thread.join()
        for fd in (steps.memory, *steps.bells_in, replies.memory):
            os.close(fd)
        for bell in (*replies.bells_in, *replies.bells_out):
            os.close(bell)
    assert len(ended) == 1


def diary() -> Diary:
    runner = make_runner(make_scheduler(block_size=16))
    runner.__class__ = Diary
    noted: Diary = runner  # type: ignore[assignment]
    noted.events = []
    return noted


class LongStep(PendingOutput):
    """A step that ends when it has been looked at a number of times, or is waited for."""

    def __init__(self, step: PendingOutput, looks: int) -> None:
        self._step = step
        self._looks = looks
        self.waits_in = ""
        """The thread that waited."""

    @property
    def ready(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self) -> StepOutput:
        self.waits_in = threading.current_thread().name
        return self._step.wait()


@pytest.mark.parametrize(("doze_s", "thread"), [(60.0, "loop"), (0.0, "drain")])
def test_the_end_of_a_long_step_is_looked_for_before_a_thread_waits(
    doze_s: float, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SPIN_S", 1e-6)
    monkeypatch.setattr(worker_module, "_DOZE_S", doze_s)
    runner = diary()
    execute, launched = runner.execute, []

    def execute_long(*args: Any) -> PendingOutput:
        launched.append(LongStep(execute(*args), looks=50))
        return launched[-1]

    monkeypatch.setattr(runner, "execute", execute_long)
    with worker(runner) as core:
        core.step(step(0))
        assert core.hear() == (Reply.OUTPUT, 0)
        core.step(step(1))
        assert core.hear() == (Reply.OUTPUT, 1)
    assert [long.waits_in for long in launched] == [thread, thread]


def step(step_id: int) -> StepInput:
    """Return a step of one row: its first token, then the tokens that it has sampled."""
    entering = {0: Request([7, 8], 9)} if step_id == 0 else None
    made = make_step([(0, 2 if step_id == 0 else 1, [0] * (step_id == 0))], entering, step_id)
    made.beat = step_id
    return made


def test_a_call_is_taken_between_the_steps_it_was_sent_between() -> None:
    runner = diary()
    with worker(runner) as core:
        core.step(step(0))
        core.call(5, StartProfile(folder="/f"))
        core.step(step(1))
        heard = [core.hear() for _ in range(3)]
    assert runner.events == ["step 0", "start", "step 1"]
    assert heard == [
        (Reply.OUTPUT, 0),
        (Reply.ANSWER, CallAnswer(number=5, result={"file": "/f"})),
        (Reply.OUTPUT, 1),
    ]


def test_a_call_between_a_step_and_its_masks_comes_after_the_step() -> None:
    runner = diary()
    none = np.empty(0, np.int32)
    with worker(runner) as core:
        waiting = step(0)
        waiting.awaits_masks = 1
        core.step(waiting)
        core.call(5, StartProfile(folder="/f"))
        core.masks(StepMasks(0, 0, none, none, none))
        core.step(step(1))
        kinds = [core.hear()[0] for _ in range(3)]
    assert runner.events == ["step 0", "start", "step 1"]
    assert kinds == [Reply.OUTPUT, Reply.ANSWER, Reply.OUTPUT]


def test_a_rank_that_sends_no_outputs_answers_calls() -> None:
    with worker(diary(), answers=False) as core:
        core.call(0, StartProfile(folder="/f"))
        assert core.hear() == (Reply.ANSWER, CallAnswer(number=0, result={"file": "/f"}))


def test_a_refusal_is_the_answer_and_the_worker_goes_on() -> None:
    with worker(diary()) as core:
        core.call(0, StopProfile())
        assert core.hear() == (
            Reply.ANSWER,
            CallAnswer(number=0, error="stop_profile: nothing runs"),
        )
        core.step(step(0))
        assert core.hear() == (Reply.OUTPUT, 0)


def test_a_runner_without_the_method_refuses_by_name() -> None:
    answer = answer_call(SentCall(number=3, call=WakeUp()), [])
    assert answer == CallAnswer(number=3, error="wake_up: this device does not take this call")


def test_any_other_exception_ends_the_worker() -> None:
    """The rank may be left in any state, so the engine cannot go on."""

    class Broken:
        def wake_up(self, call: WakeUp) -> CallResult:
            raise RuntimeError("half of it is done")

    with pytest.raises(RuntimeError, match="half of it is done"):
        answer_call(SentCall(number=0, call=WakeUp()), [Broken()])


@pytest.mark.parametrize("call", ALL_CALLS, ids=lambda call: call.__name__)
def test_every_call_crosses_the_wire(call: Any) -> None:
    fields = {name: 1 if name == "level" else "/x" for name in call.__struct_fields__}
    sent = SentCall(number=9, call=call(**fields))
    assert decode_call(encode(sent)) == sent


def test_a_call_is_answered_when_the_last_rank_has_answered() -> None:
    answers = RankAnswers(2, lambda rank: f"worker {rank}")
    first, second = answers.open(), answers.open()
    answers.take(1, CallAnswer(number=first, result={"a": 1}))
    assert answers.take_answered() == [] and answers.missing(first) == "worker 0"
    assert answers.missing(second) == "worker 0, worker 1"
    answers.take(0, CallAnswer(number=first, error="no room"))
    assert answers.take_answered() == [Answered(first, [{}, {"a": 1}], "worker 0: no room", 1)]
    assert answers.take_answered() == []
    for rank in (0, 1):
        answers.take(rank, CallAnswer(number=second, error="no room"))
    assert answers.take_answered() == [Answered(second, [{}, {}], "no room", 2)]


def test_the_methods_of_every_runner_take_the_calls_of_their_names(runner: ModelRunner) -> None:
    """A call without a method is refused; the fake device has no weights."""
    fake = make_runner(make_scheduler(block_size=16))
    for parts, missing in ((fake.calls, {"apply_weights", "drop_weights"}), (runner.calls, set())):
        methods: dict[str, Any] = {
            name(call): getattr(part, name(call))
            for call in ALL_CALLS
            for part in parts
            if hasattr(part, name(call))
        }
        assert methods.keys() == {name(call) for call in ALL_CALLS} - missing
        for call in ALL_CALLS:
            if name(call) in methods:
                types = get_type_hints(methods[name(call)])
                assert types == {"call": call, "return": CallResult}


def name(call: type[WorkerCall]) -> str:
    return str(call.__struct_config__.tag)
