"""Waiting for the engine to be as a test needs it: by asking it, never by sleeping for a guessed
time.
"""

from __future__ import annotations

import asyncio

from sidestep import AsyncLLM


async def until_idle(llm: AsyncLLM, limit_s: float = 20.0) -> None:
    """Returns when no request is left and all KV blocks are free; fails with the statistics
    otherwise.
    """
    async with asyncio.timeout(limit_s):
        while True:
            stats = await llm.get_stats()
            if stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0:
                return
            await asyncio.sleep(0)
