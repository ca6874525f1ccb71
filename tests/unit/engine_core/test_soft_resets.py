"""The core after a step that failed: it goes on, or ends where that does not help."""

from __future__ import annotations

from typing import Literal

import pytest

from sidestep.engine_core.core import EngineCore
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.transport.messages import Call, unpack_ids
from sidestep.ipc.transport.records import unpack_steps
from tests.fakes import VOCAB_SIZE, make_request
from tests.unit.engine_core.test_core import HandExecutor, make_core


def turn(core: EngineCore, executor: HandExecutor) -> list[int]:
    """Run a turn of the loop and a step; return the tokens that came."""
    tokens = []
    for _, outputs in core.step():
        tokens += unpack_ids(outputs.token_ids).tolist()
    if core.in_flight:
        executor.finish_step()
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_is_run_again_with_those_behind_it(depth: int) -> None:
    core, executor, clock = make_core(depth)
    core.handle(make_request([1, 2, 3], 12))
    tokens = [token for _ in range(3) for token in turn(core, executor)]
    for _, outputs in core.step():
        tokens += unpack_ids(outputs.token_ids).tolist()
    assert core.in_flight == depth
    executor.fail_step("oom")
    clock.now = 9.0
    tokens += turn(core, executor)
    assert core.in_flight == depth and executor.num_resets == 1
    assert core.seconds_since_progress() == 0.0
    for _ in range(20):
        tokens += turn(core, executor)
    assert tokens == expected_tokens([1, 2, 3], 12, 0, VOCAB_SIZE)
    stats = core.handle(Call(client=0, call_id=1, method="stats"))
    assert stats is not None and stats.result is not None
    assert stats.result["soft_resets_oom"] == 1 and stats.result["soft_resets_exception"] == 0


def test_lost_steps_are_recorded_without_tokens_and_time() -> None:
    core, executor, _ = make_core()
    core.handle(make_request([1, 2, 3], 5))
    turn(core, executor)
    core.step()
    executor.fail_step()
    for _ in range(9):
        turn(core, executor)
    records = unpack_steps(core.recorder.records())
    assert [record.step_id for record in records] == list(range(len(records)))
    assert [record.num_sampled for record in records[:4]] == [1, 0, 0, 1]
    assert all(record.start_ns == record.end_ns for record in records[1:3])


def test_a_replica_that_dies_after_a_reset_leaves_notes_of_the_right_steps() -> None:
    core, executor, clock = make_core()
    clock.now = 5.0
    core.handle(make_request([1, 2, 3], 9))
    turn(core, executor)
    core.step()
    executor.fail_step()
    turn(core, executor)
    core.handle(make_request([4, 5], 9, handle=1))
    turn(core, executor)
    in_flight = [step.step_id for step in executor.submitted[-core.in_flight :]]
    executor.fail_step()
    with pytest.raises(EngineDeadError):
        core.step()
    core.take_started()
    notes = core.recorder._box.read()
    assert [step.step_id for step in notes.steps] == list(range(in_flight[0]))
    assert [flight.step_id for flight in notes.flights] == in_flight
    assert all(request.scheduled_ns is not None for request in notes.requests)


@pytest.mark.parametrize(("good", "lives"), [(99, False), (100, True)])
@pytest.mark.parametrize("cause", ["oom", "exception"])
def test_two_failures_need_a_hundred_good_steps_between_them(
    good: int, lives: bool, cause: Literal["oom", "exception"]
) -> None:
    core, executor, _ = make_core(depth=1)
    core.handle(make_request([1, 2, 3], 300))
    core.step()
    executor.fail_step(cause)
    core.step()
    for _ in range(good):
        executor.finish_step()
        core.step()
    executor.fail_step("exception")
    if lives:
        core.step()
        assert core.in_flight == 1
    else:
        with pytest.raises(EngineDeadError, match="worker 0 failed"):
            core.step()


def test_rows_that_are_named_end_one_after_the_other() -> None:
    """A request that has ended does no harm again, so the next failure says nothing new."""
    core, executor, _ = make_core()
    for handle in range(4):
        core.handle(make_request([handle + 1, 2, 3], 6, handle=handle))
    ended = []
    for handle in (2, 0, 1):
        core.step()
        executor.fail_step(slot=core.scheduler._requests[0, handle].slot)
        for _, outputs in core.step():
            ended += [(word.handle, word.error) for word in outputs.finished]
    why = "the engine cannot compute this request: worker 0 failed"
    assert ended == [(2, why), (0, why), (1, why)]
    tokens = [token for _ in range(12) for token in turn(core, executor)]
    assert tokens == expected_tokens([4, 2, 3], 6, 3, VOCAB_SIZE)
