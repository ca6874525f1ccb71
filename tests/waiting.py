"""Waiting for a state of the engine: by asking it, never by sleeping for a guessed time."""

from __future__ import annotations

import asyncio

from sidestep import AsyncLLM


async def until_idle(llm: AsyncLLM, limit_s: float = 20.0) -> None:
    """Return when no request is left and all KV blocks are free.

    Otherwise fail with the statistics.
    """
    async with asyncio.timeout(limit_s):
        while True:
            stats = await llm.get_stats()
            if stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0:
                return
            await asyncio.sleep(0)
