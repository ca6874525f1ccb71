"""A replica that leaves, among replicas that the test plays."""

from __future__ import annotations

import asyncio

import pytest

from sidestep import AsyncLLM, EngineDeadError
from tests.unit.frontend.fakes import FakeChannel
from tests.unit.frontend.replicas.played import last, turns


async def test_questions_to_a_replica_that_leaves_end(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    asked = asyncio.create_task(llm._replicas.ask(2, "stats", timeout_s=30))
    await turns()
    llm._replicas.hear_left(2)
    with pytest.raises(EngineDeadError, match="replica 2: it has left the engine"):
        await asked
    assert [status.number for status in llm.replicas] == [0, 1]
    assert llm.health == "healthy"


async def test_a_replica_that_has_left_gets_no_requests(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    llm._replicas.attach()
    llm._replicas.hear_left(2)
    tasks = [asyncio.create_task(last(llm, [5 + i] * 40)) for i in range(4)]
    await turns()
    counts = [len(channel.added) for channel in channels]
    assert sum(counts) == 4 and counts[2] == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
