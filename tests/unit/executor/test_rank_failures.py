"""The reports of ranks about a step that has failed: they agree, or the replica ends."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.executor.base import StepFailed
from sidestep.executor.hosts.rank_failures import RankFailures
from sidestep.ipc.common.errors import EngineDeadError


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def failed(rank: int, **fields: Any) -> StepFailed:
    return StepFailed(
        **{"step_id": 7, "cause": "exception", "text": f"rank {rank} failed", **fields}
    )


def test_a_step_that_fails_on_all_ranks_alike_is_one_failure() -> None:
    failures = RankFailures(2, Clock())
    assert failures.take_agreed() is None and failures.next_look is None
    failures.take(1, failed(1))
    assert failures.take_agreed() is None
    failures.ran(6)  # the other rank is still at the step before
    failures.take(0, failed(0))
    assert failures.take_agreed() == failed(0)
    assert failures.take_agreed() is None and failures.next_look is None
    failures.ran(8)


def test_a_rank_that_does_not_report_waits_for_the_others() -> None:
    clock = Clock()
    failures = RankFailures(2, clock)
    failures.take(1, failed(1))
    assert failures.next_look is not None
    clock.now = failures.next_look - 0.1
    assert failures.take_agreed() is None
    failures.ran(6)
    clock.now = failures.next_look
    with pytest.raises(EngineDeadError, match="rank 1 failed"):
        failures.take_agreed()


def test_a_rank_that_has_run_the_step_differs() -> None:
    failures = RankFailures(2, Clock())
    failures.take(1, failed(1))
    with pytest.raises(EngineDeadError, match="rank 1 failed"):
        failures.ran(7)


@pytest.mark.parametrize("fields", [{"step_id": 8}, {"place": 1}, {"slot": 3}], ids=str)
def test_ranks_that_have_failed_in_other_ways_differ(fields: dict[str, Any]) -> None:
    failures = RankFailures(2, Clock())
    failures.take(0, failed(0))
    failures.take(1, failed(1, **fields))
    with pytest.raises(EngineDeadError, match="rank 0 failed"):
        failures.take_agreed()


def test_one_rank_agrees_with_itself() -> None:
    failures = RankFailures(1, Clock())
    failures.take(0, failed(0))
    assert failures.take_agreed() == failed(0)
