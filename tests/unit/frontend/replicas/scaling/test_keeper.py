"""The keeper of the number of replicas, over replicas that only count."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from sidestep import EngineArgs
from sidestep.frontend.replicas.scaling.keeper import OwnKeeper
from sidestep.ipc.transport.messages import Answer
from sidestep.ipc.transport.owner_line import Loaded


class CountedMembers:
    """Replicas of which some are absent, and some stay dead."""

    def __init__(self, num_serving: int, num_absent: int) -> None:
        self.num_serving, self.num_absent = num_serving, num_absent
        self.places, self.is_steady = 8, True
        self.now = Loaded(0.0, 0)
        self.num_brought = 0

    @property
    def can_bring(self) -> bool:
        return self.num_absent > 0

    def load(self) -> Loaded:
        return self.now

    def bring(self) -> None:
        assert self.can_bring
        self.num_absent -= 1
        self.num_serving += 1
        self.num_brought += 1

    def retire(self) -> int | None:
        return None

    def clear_out(self, replica: int) -> None:
        raise AssertionError("nothing leaves")

    def leaves(self, replica: int) -> bool:
        return False

    def has_requests(self, replica: int) -> bool:
        return False

    def ask_idle(self, replica: int) -> asyncio.Future[Answer]:
        raise AssertionError("nothing leaves")

    def dismiss(self, replica: int) -> None:
        raise AssertionError("nothing leaves")


def _keeper(members: CountedMembers, least: int = 1) -> OwnKeeper:
    args = EngineArgs(device="fake", data_parallel_size=2, max_replicas=3, min_replicas=least)
    config = args.create_engine_config()
    clock = itertools.count()
    return OwnKeeper(config, members, lambda: float(next(clock)))


def test_where_no_replica_is_absent_nothing_is_brought_or_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = CountedMembers(num_serving=1, num_absent=0)  # the other two stay dead
    members.now = Loaded(9.0, 30)
    keeper = _keeper(members)
    for _ in range(20):
        keeper.look()
    assert members.num_brought == 0
    assert not caplog.records


def test_an_idle_engine_that_cannot_get_more_replicas_is_not_looked_at() -> None:
    assert not _keeper(CountedMembers(num_serving=1, num_absent=0), least=2).look()


def test_missing_replicas_are_brought_without_load() -> None:
    members = CountedMembers(num_serving=1, num_absent=2)
    keeper = _keeper(members, least=2)
    while keeper.look():
        pass
    assert (members.num_serving, members.num_brought) == (2, 1)
