"""A worker after an exception in a step: it goes on from empty tables, or it ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sidestep.executor.base import StepFailed
from sidestep.executor.processes.step_failure import MessageLostError, failure_of
from sidestep.executor.processes.worker import Resets
from sidestep.executor.processes.worker_orders import Reply
from sidestep.executor.runner.fake import FakeRunner
from sidestep.executor.runner.runner import PendingOutput, RowError
from sidestep.ipc.transport.shm_ring import RingClosed
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from sidestep.ipc.transport.worker_calls import CallAnswer, StopProfile
from tests.fakes import make_runner, make_scheduler
from tests.unit.executor.steps import Request, make_step
from tests.unit.executor.test_worker_calls import Core, worker

NONE = np.empty(0, np.int32)


class LateError(PendingOutput):
    """A step that fails when its output is awaited."""

    ready = True

    def wait(self) -> StepOutput:
        raise RuntimeError("not a number")


class Broken(FakeRunner):
    """A runner on which some steps fail."""

    failing: dict[int, Exception]
    late: tuple[int, ...] = ()
    """Steps that fail when they have been launched."""
    begun: list[int]

    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        self.begun.append(step.step_id)
        if step.step_id in self.failing:
            raise self.failing[step.step_id]
        pending = super().execute(step, receive_masks)
        return LateError() if step.step_id in self.late else pending


def broken(*late: int, **failing: Exception) -> Broken:
    """Return a runner. failing: the exceptions of steps, `step_3=...`; late: see Broken."""
    runner = make_runner(make_scheduler(block_size=16))
    runner.__class__ = Broken
    made: Broken = runner  # type: ignore[assignment]
    made.failing = {int(name.removeprefix("step_")): error for name, error in failing.items()}
    made.late, made.begun = late, []
    return made


def step(step_id: int, *, enters: bool = False, masked: bool = False) -> StepInput:
    """Return a step of one row."""
    entering = {0: Request([7, 8], 90)} if enters else None
    made = make_step([(0, 2 if enters else 1, [0] * enters)], entering, step_id)
    made.beat, made.awaits_masks = step_id, int(masked)
    return made


def heard(core: Core, count: int) -> list[tuple[int, object]]:
    """Return the next replies; of a failure only the step, the cause and the slot."""
    replies = list[tuple[int, object]]()
    for _ in range(count):
        kind, said = core.hear()
        if isinstance(said, StepFailed):
            said = (said.step_id, said.cause, said.slot)  # type: ignore[assignment]
        replies.append((kind, said))
    return replies


def test_steps_behind_a_failed_one_are_not_run_and_new_ones_are() -> None:
    runner = broken(step_1=ValueError("bad"))
    with worker(runner, resets=Resets.ALONE) as core:
        core.step(step(0, enters=True))
        core.step(step(1, masked=True))
        core.step(step(2))
        core.masks(StepMasks(1, 0, NONE, NONE, NONE))
        core.call(0, StopProfile())
        core.reset()
        core.step(step(3, enters=True))
        core.step(step(4))
        replies = heard(core, 6)
    assert replies == [
        (Reply.OUTPUT, 0),
        (Reply.STEP_FAILED, (1, "exception", -1)),
        (Reply.ANSWER, CallAnswer(number=0, error="stop_profile: no profile is being recorded")),
        (Reply.RESET, -1),
        (Reply.OUTPUT, 3),
        (Reply.OUTPUT, 4),
    ]
    assert runner.begun == [0, 1, 3, 4]


def test_a_step_that_waits_for_masks_is_given_up_for_the_one_before() -> None:
    """The first step has failed behind its launch, while the second waits for its masks."""
    runner = broken(0)
    with worker(runner, resets=Resets.ALONE) as core:
        core.step(step(0, enters=True))
        core.step(step(1, masked=True))
        assert heard(core, 1) == [(Reply.STEP_FAILED, (0, "exception", -1))]
        core.reset()
        core.step(step(2, enters=True))
        assert heard(core, 2) == [(Reply.RESET, -1), (Reply.OUTPUT, 2)]


def test_a_step_that_fails_late_is_reported_in_its_place() -> None:
    runner = broken(1)
    with worker(runner, resets=Resets.ALONE) as core:
        core.step(step(0, enters=True))
        core.step(step(1))
        core.step(step(2))
        replies = heard(core, 3)
        core.reset()
        core.step(step(3, enters=True))
        replies += heard(core, 2)
    assert replies == [
        (Reply.OUTPUT, 0),
        (Reply.STEP_FAILED, (1, "exception", -1)),
        (Reply.OUTPUT, 2),  # the core drops it
        (Reply.RESET, -1),
        (Reply.OUTPUT, 3),
    ]


def test_a_stage_of_a_pipeline_ends() -> None:
    with worker(broken(step_0=RuntimeError("bad")), resets=Resets.NEVER) as core:
        core.step(step(0, enters=True))


def test_a_rank_goes_on_unless_others_may_wait_for_it() -> None:
    runner = broken(step_0=RuntimeError("bad"), step_2=RuntimeError("bad"))
    runner.place = 1
    with worker(runner, resets=Resets.ALIKE) as core:
        core.step(step(0, enters=True))
        core.reset()
        assert heard(core, 2) == [(Reply.STEP_FAILED, (0, "exception", -1)), (Reply.RESET, -1)]
        core.step(step(1, enters=True))
        assert heard(core, 1) == [(Reply.OUTPUT, 1)]
        runner.place = None
        core.step(step(2))


def test_a_rank_whose_device_fails_ends() -> None:
    with worker(broken(0), resets=Resets.ALIKE) as core:
        core.step(step(0, enters=True))


def test_a_device_that_is_broken_ends_the_worker_at_the_reset() -> None:
    runner = broken(step_0=ValueError("bad"))

    def reset() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.reset = reset  # type: ignore[method-assign]
    with worker(runner, resets=Resets.ALONE) as core:
        core.step(step(0, enters=True))
        assert heard(core, 1) == [(Reply.STEP_FAILED, (0, "exception", -1))]
        core.reset()


def report(error: Exception) -> StepFailed | None:
    """Return the report of an exception that has been raised."""
    try:
        raise error
    except Exception as caught:
        return failure_of(caught, 7)


def test_a_report_begins_with_the_first_line_of_the_exception() -> None:
    """Errors of CUDA end with hints for people who debug them."""
    failed = report(ValueError("the kernel failed\nFor debugging consider a flag"))
    assert failed is not None and failed.line == "ValueError: the kernel failed"
    assert failed.text.endswith("For debugging consider a flag")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("no room"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_want_of_memory_is_its_own_cause(error: Exception) -> None:
    try:
        raise RowError(4, error) from error
    except RowError as named:
        for failed in (report(error), failure_of(named, 7)):
            assert failed is not None and failed.cause == "oom"
            assert failed.slot == -1, "the row is not to blame"


def test_a_report_names_the_row_and_begins_with_the_exception() -> None:
    plain, named = report(ValueError("bad")), report(RowError(4, ValueError("bad")))
    assert plain is not None and (plain.step_id, plain.cause, plain.slot) == (7, "exception", -1)
    assert plain.line == "ValueError: bad" and "Traceback" in plain.text
    assert named is not None and (named.cause, named.slot) == ("exception", 4)
    assert named.line == "ValueError: bad" and "Traceback" in named.text


class AcceleratorError(RuntimeError):
    """An exception named as torch's own."""


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("the tables contradict themselves"),
        MessageLostError("step 3 has come in the place of 2"),
        RingClosed("the core has ended"),
        AcceleratorError("device-side assert triggered"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("NCCL communicator was aborted"),
    ],
)
def test_what_a_reset_does_not_help_ends_the_worker(error: Exception) -> None:
    assert report(error) is None
    try:
        raise RowError(1, error) from error
    except RowError as named:
        assert failure_of(named, 0) is None
