"""A lane, which runs long pieces of work one at a time.

So one client's requests cannot take all threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """A lane that runs one job at a time, in a thread.

    The smallest waiting job is next, so a large one delays few. A lane belongs to one event loop.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def run(
        self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the function's result.

        A job that has begun runs to its end, even if its caller no longer waits.
        """
        await self._enter(size)
        job = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
        job.add_done_callback(self._leave)
        return await asyncio.shield(job)

    async def _enter(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # this job's turn had come
            raise

    def _leave(self, job: asyncio.Future[T]) -> None:
        if not job.cancelled():
            job.exception()  # mark the exception as read: the caller may have left
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False


def give_memory_back() -> None:
    """Return freed memory to the system where the C library would keep it.

    The call releases the interpreter lock.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
