"""Waiting for a state of the engine: by asking it, never by sleeping for a guessed time.

Each wait has a limit, and fails with the last state. A test that waited without one for a state
that has passed, or never comes, would end its test process with all tests that come behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sidestep import AsyncLLM

LIMIT_S = 60.0
"""Seconds that a state may take to come. A busy machine needs some; a hang takes all."""

State = TypeVar("State")


async def until(
    ask: Callable[[], Awaitable[State]],
    wanted: Callable[[State], bool],
    limit_s: float = LIMIT_S,
) -> State:
    """Ask for a state again and again until it is wanted, and return it.

    Raises AssertionError with the last state after the limit.
    """
    state = await ask()
    end = asyncio.get_running_loop().time() + limit_s
    while not wanted(state):
        assert asyncio.get_running_loop().time() < end, state
        await asyncio.sleep(0)
        state = await ask()
    return state


async def until_stats(llm: AsyncLLM, limit_s: float = LIMIT_S, **least: int) -> dict[str, float]:
    """Return the statistics when each of the named ones is at least the given number."""
    return await until(
        llm.get_stats,
        lambda stats: all(stats[name] >= number for name, number in least.items()),
        limit_s,
    )


async def until_idle(llm: AsyncLLM, limit_s: float = LIMIT_S) -> None:
    """Return when no request is left and all KV blocks are free."""
    await until(
        llm.get_stats,
        lambda stats: stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0,
        limit_s,
    )
