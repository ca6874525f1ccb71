"""Read and render large bodies in a thread, one at a time, so that the event loop is not blocked.

A thread alone is not enough, because one call makes all objects of a JSON text and holds the
interpreter lock. Long strings take little time, but many values take long, so their number is
bounded before they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from sidestep.frontend.input.lane import Lane, give_memory_back
from sidestep.frontend.server.transport.body import decode
from sidestep.frontend.server.transport.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 64 << 10
"""Bytes from which the work on a body would noticeably delay the streams of the event loop."""
_HUGE = 1 << 20
"""Bytes of a body from which its freed memory is returned to the system."""
MOST_VALUES = 1 << 19
"""Largest number of JSON values in a body.

A model with a longer context raises the limit, so that its longest prompt fits as token ids."""
_MARKS = (b",", b"[", b"{")
_PIECE = 1 << 20
"""Bytes that are searched at once."""


class LargeBodies:
    """Thread of the server that works on large bodies."""

    def __init__(self, most_values: int = MOST_VALUES) -> None:
        self._most_values = most_values
        self._lane = Lane()
        self._giving_back: asyncio.Task[None] | None = None

    async def decode(self, data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        """Return the struct of a JSON text. Raises ApiError."""
        return await self.run(len(data), self._decode, data, decoder)

    async def run(
        self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a function that works on a body of `size` bytes.

        The function runs in the event loop if the body is small, else in the thread.
        """
        if size <= LARGE:
            return function(*args, **kwargs)
        return await self._lane.run(size, function, *args, **kwargs)

    def leave_no_memory(self, size: int) -> None:
        """Return the freed memory of a body of `size` bytes to the system, soon."""
        if size > _HUGE and (self._giving_back is None or self._giving_back.done()):
            self._giving_back = asyncio.create_task(self._lane.run(0, give_memory_back))

    def _decode(self, data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        if len(data) > self._most_values and has_more_values(data, self._most_values):
            raise ApiError(
                413,
                f"the body holds more than {self._most_values} values; send less in one request",
                code="body_too_large",
            )
        return decode(data, decoder)


def has_more_values(data: bytes, most: int) -> bool:
    """Return whether a JSON text has more than `most` commas and opening brackets outside strings.

    Each value but the first has one of them. Other threads can run meanwhile.
    """
    upper = 0
    for begin in range(0, len(data), _PIECE):
        piece = data[begin : begin + _PIECE]
        upper += sum(map(piece.count, _MARKS))
        if upper > most:
            return _count_outside(data, most) > most
    return False


def _count_outside(data: bytes, most: int) -> int:
    """Return the number of commas and opening brackets outside strings.

    Counting stops once the number is above `most`.
    """
    count = at = 0
    while at < len(data) and count <= most:
        # A bounded search holds the interpreter lock for a bounded time.
        quote = data.find(b'"', at, at + _PIECE)
        end = quote if quote >= 0 else min(at + _PIECE, len(data))
        count += sum(data.count(mark, at, end) for mark in _MARKS)
        at = end if quote < 0 else _after_string(data, quote)
    return count


def _after_string(data: bytes, quote: int) -> int:
    """Return the offset after the string that begins at a quotation mark."""
    at = quote
    while (at := data.find(b'"', at + 1)) >= 0:
        before = at
        while data[before - 1] == 0x5C:  # a backslash, which may be escaped itself
            before -= 1
        if (at - before) % 2 == 0:
            return at + 1
    return len(data)
