"""Calls of kernels in C by a team of threads: one by one, or as a tape of many.

A step of few tokens has some hundred calls. Between two of them Python runs, and threads that wait
longer than they spin fall asleep. A tape has the calls of such a step: it is recorded while the
step runs, and then played for each step of the same form. This is for a CPU what a captured graph
is for a GPU, and as there, all numbers of a step must be in memory that stays where it is:

- Results of kernels are in memory of the tape (`empty`).
- Only kernels in C can be played. A tape that sees another operation of torch is of no use, and
  says which one it was. Views alone are none. Memory that torch allocates would not stay.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sidestep.kernels.native.library import load

_LEAST_BYTES = 64
"""Bytes of the smallest memory, and what the places of all are multiples of."""


class _Call(Structure):
    """A call, as tape.c knows it."""

    _fields_ = (("kernel", c_void_p), ("arguments", c_void_p))


class _Recording(threading.local):
    """The tape that this thread records."""

    tape: Tape | None = None


_recording = _Recording()


def launch(kernel: int, arguments: Structure, *, alone: bool = False) -> None:
    """Call a kernel with torch's threads. alone: with this thread only, where that is faster.

    kernel: its address. A tape that is recorded keeps the arguments, but not what they point to.
    """
    one, _ = _players()
    one(kernel, ctypes.byref(arguments), 1 if alone else torch.get_num_threads())
    if _recording.tape is not None:
        _recording.tape.add(kernel, arguments)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a result of a kernel; the tape's that is recorded, if there is one."""
    if _recording.tape is None:
        return torch.empty(shape, dtype=dtype)
    return _recording.tape.memory.empty(shape, dtype)


class TapeMemory:
    """Memory for the results within tapes that are played one at a time.

    A result's memory is free again when its tensor and all views of it are gone. So it serves later
    calls, of this tape and of others.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        """By number of bytes."""
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"TapeMemory({self.nbytes} bytes)"

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor."""
        needed = math.prod(shape) * dtype.itemsize
        nbytes = max(_LEAST_BYTES, 1 << (needed - 1).bit_length())
        free = self._free[nbytes]
        if not free:
            self.nbytes += nbytes
            whole = np.empty(nbytes + _LEAST_BYTES, np.uint8)
            begin = -whole.ctypes.data % _LEAST_BYTES
            free.append(whole[begin : begin + nbytes])
        block = free.pop()
        # A tensor keeps the array that it was made of, and the array can tell that it is gone.
        array = block[:needed]
        weakref.finalize(array, free.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(*shape)


class Tape:
    """Calls of kernels in C, which one team of threads makes again in their order."""

    def __init__(self, memory: TapeMemory) -> None:
        """Begin with no calls."""
        self.memory = memory
        self.other: str | None = None
        """The first operation that was not a kernel in C, because of which it cannot be played."""
        self._recorded: list[tuple[int, Structure]] = []
        self._calls: Any = None

    def __repr__(self) -> str:
        return f"Tape({len(self._recorded)} calls)"

    def add(self, kernel: int, arguments: Structure) -> None:
        """Add a call."""
        self._recorded.append((kernel, arguments))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Add the calls of kernels that this thread makes within the context."""
        _recording.tape = self
        try:
            with _Watch(self):
                yield
        finally:
            _recording.tape = None
        calls = [_Call(kernel, ctypes.addressof(own)) for kernel, own in self._recorded]
        self._calls = (_Call * len(calls))(*calls)

    def play(self) -> None:
        """Make the calls again, with what is in their memory now."""
        assert self._calls is not None and self.other is None, "it cannot be played"
        _, every = _players()
        every(self._calls, len(self._recorded), torch.get_num_threads())


class _Watch(TorchDispatchMode):
    """Notes the first operation of torch within a tape that computes or allocates."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler to keep it from this class, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._tape.other is None and not func.is_view:
            self._tape.other = func._schema.name
        return func(*args, **(kwargs or {}))


@functools.cache
def _players() -> tuple[Any, Any]:
    """Return the functions that call one kernel, and several. Raises NoLibraryError."""
    library = load("tape.c")
    library.call_one.argtypes = (c_void_p, c_void_p, c_int32)
    library.call_all.argtypes = (c_void_p, c_int64, c_int32)
    library.call_one.restype = library.call_all.restype = None
    return library.call_one, library.call_all
