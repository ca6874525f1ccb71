"""Reads of 256 bytes at a time for tiles that the bulk copy engine fills.

A descriptor of tiles also says how many bytes L2 reads from memory where it lacks a line: 64, 128
or 256 (CUtensorMapL2promotion in the CUDA driver's reference). Triton writes 128 into all of them.
A tile of codes has 128 bytes of each row of its matrix, and the next 128 are those of the program's
next step. With 256 the memory reads both at once.

Triton has no argument for it. So its descriptor is made once more by the driver's own function and
put in the place of the first, if that one has the bytes which the driver gives for 128.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import triton
from torch import Tensor

from sidestep.kernels.cuda.tile_maps import BYTES, L2_128, L2_256, encoded

_FILLERS = "fill_tma_descriptor", "fill_tma_descriptor_tiled"
"""Triton's function that makes a descriptor, by the names it has in Triton 3.6 and in 3.9."""


@contextlib.contextmanager
def wide_reads(matrix: Tensor) -> Iterator[None]:
    """Let the matrix's tiles be read by 256 bytes, in what is launched meanwhile.

    One thread of a process launches kernels, so no other one replaces Triton's function meanwhile.
    A launch within a graph costs this once, when it is captured.
    """
    # A process that only compiles has a driver without a GPU, which fills no descriptors.
    driver = getattr(triton.runtime.driver.active, "utils", None)
    name = next((name for name in _FILLERS if hasattr(driver, name)), None)
    if name is None:
        yield
        return
    plain = getattr(driver, name)
    setattr(driver, name, functools.partial(filled_wide, plain, matrix.data_ptr()))
    try:
        yield
    finally:
        setattr(driver, name, plain)


def filled_wide(fill: Callable[..., object], address: int, *arguments: Any) -> object:
    """Return Triton's descriptor of these arguments, with wide reads if it is of that address."""
    descriptor = fill(*arguments)
    if arguments[0] != address:
        return descriptor
    frozen = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)
    # The descriptor is the second half of Triton's object. Where it is not, nothing is changed.
    place = id(descriptor) + BYTES
    known = type(descriptor).__basicsize__ == 2 * BYTES and place % BYTES == 0
    wide = encoded(frozen, L2_256) if known else None
    if wide is not None and ctypes.string_at(place, BYTES) == encoded(frozen, L2_128):
        ctypes.memmove(place, wide, BYTES)
    return descriptor
