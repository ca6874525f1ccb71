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

_L2_128, _L2_256 = 2, 3
_BYTES = 128
"""Bytes of a descriptor, which also lies at a multiple of them."""
_FILLERS = "fill_tma_descriptor", "fill_tma_descriptor_tiled"
"""Triton's function that makes a descriptor, by the names it has in Triton 3.6 and in 3.9."""

Arguments = tuple[Any, ...]


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
    place = id(descriptor) + _BYTES
    known = type(descriptor).__basicsize__ == 2 * _BYTES and place % _BYTES == 0
    wide = encoded(frozen, _L2_256) if known else None
    if wide is not None and ctypes.string_at(place, _BYTES) == encoded(frozen, _L2_128):
        ctypes.memmove(place, wide, _BYTES)
    return descriptor


@functools.lru_cache(maxsize=4096)
def encoded(arguments: Arguments, promotion: int) -> bytes | None:
    """Return the driver's descriptor for Triton's arguments, or None if it makes none."""
    address, swizzle, item_bytes, kind, block, shape, strides, fill = arguments
    rank = len(shape)
    # The driver counts from the innermost dimension on, and leaves out its stride.
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * rank)(*(s * item_bytes for s in reversed(strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(block))
    every = (ctypes.c_uint32 * rank)(*[1] * rank)
    memory = (ctypes.c_ubyte * (2 * _BYTES))()
    begin = -ctypes.addressof(memory) % _BYTES
    place = ctypes.addressof(memory) + begin
    interleave = 0
    error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        kind,
        rank,
        ctypes.c_void_p(address),
        sizes,
        steps,
        box,
        every,
        interleave,
        swizzle,
        promotion,
        fill,
    )
    return bytes(memory)[begin : begin + _BYTES] if error == 0 else None
