"""Memory of a CPU in large pages: a step of few tokens reads all weights, page by page.

With pages of 4 KiB a CPU looks up an address for every 64 lines that it reads, and in a virtual
machine each look-up has two levels. Linux gives pages of 2 MiB to memory that asks for them, where
`/sys/kernel/mm/transparent_hugepage/enabled` is not `never`. Elsewhere the memory is as usual.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PAGE = 2 << 20
_SMALL = 4 * _PAGE
"""Bytes below which tensors are cut from one memory, since only whole pages are large."""
_SHARED = 32 * _PAGE
_ALIGNED = 64

_last: tuple[weakref.ref[NDArray[np.uint8]], int] | None = None
"""The memory that small tensors have been cut from last, and up to where it is taken."""


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor that is kept for long. Raises MemoryError or OSError."""
    nbytes = math.prod(shape) * dtype.itemsize
    # A memory goes back as a whole. So a large tensor shares none: another would keep all of it.
    part = _part(nbytes) if nbytes < _SMALL else _own(nbytes)
    return torch.from_numpy(part).view(dtype).view(*shape)


def pages_of_their_own(shape: Sequence[int]) -> Tensor:
    """Return memory of this many bytes, uint8, all 0. Raises MemoryError or OSError."""
    return torch.from_numpy(_own(math.prod(shape))).view(*shape)


def in_large_pages(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is kept for long."""
    return empty_in_large_pages(tensor.shape, tensor.dtype).copy_(tensor)


def _part(nbytes: int) -> NDArray[np.uint8]:
    """Return bytes that lie beside those of other small tensors."""
    global _last
    memory, begin = (None, 0) if _last is None else (_last[0](), _last[1])
    if memory is None or begin + nbytes > len(memory):
        memory, begin = _pages(_SHARED)
    _last = weakref.ref(memory), begin + -(-nbytes // _ALIGNED) * _ALIGNED
    return memory[begin : begin + nbytes]


def _own(nbytes: int) -> NDArray[np.uint8]:
    """Return bytes of a memory of their own."""
    memory, begin = _pages(nbytes)
    return memory[begin : begin + nbytes]


def _pages(nbytes: int) -> tuple[NDArray[np.uint8], int]:
    """Return memory, and where its first page begins, from which on it has this many bytes.

    Only whole pages are asked to be large, so that the last one takes no more than it needs.
    """
    mapped = mmap.mmap(-1, nbytes + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)
    begin = -memory.ctypes.data % _PAGE
    try:
        if nbytes >= _PAGE:
            mapped.madvise(mmap.MADV_HUGEPAGE, begin, nbytes // _PAGE * _PAGE)
    except (AttributeError, OSError):
        pass  # this system has none
    return memory, begin
