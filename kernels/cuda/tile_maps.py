"""Descriptors of tiles that the copy engine loads, by the driver's own function.

They are CUtensorMap in the CUDA driver's reference.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

BYTES = 128
"""Bytes of a descriptor, which also lies at a multiple of them."""
_ALIGNED = 16
"""Bytes of which addresses and the distances of rows are multiples."""
L2_128, L2_256 = 2, 3
"""How many bytes L2 reads from memory where it lacks a line (CUtensorMapL2promotion)."""
_PLAIN, _SWIZZLE_128 = 0, 3
"""CUtensorMapSwizzle."""
_SWIZZLED = 128
"""Bytes of a tile's row in that pattern."""
_KINDS = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType."""
Arguments = tuple[Any, ...]


class TileMap(ctypes.Structure):
    """A descriptor of tiles. Its memory is aligned by `tile_map`."""

    _fields_ = (("bytes", ctypes.c_ubyte * BYTES),)


def can_be_tiled(*tensors: Tensor) -> bool:
    """Return whether the copy engine can read tiles of these: rows and addresses are aligned."""
    return all(
        x.stride(-1) == 1
        and all(stride * x.itemsize % _ALIGNED == 0 for stride in x.stride()[:-1])
        and (x.is_meta or x.data_ptr() % _ALIGNED == 0)
        for x in tensors
    )


def tile_map(x: Tensor, rows: int, row_bytes: int) -> TileMap:
    """Return the descriptor of tiles of x [T, K], whose rows may lie apart.

    Tiles lie in shared memory in the pattern for 128 bytes a row, or row after row if these are
    shorter; what is outside x is zero.
    """
    return box_map(x, (rows,), row_bytes)


def box_map(x: Tensor, counts: tuple[int, ...], row_bytes: int) -> TileMap:
    """Return the descriptor of boxes of x, which lie in shared memory as the rows of a tile do.

    counts: the sizes of a box, but for the innermost one, which has row_bytes.
    """
    block, kind, zeros = (*counts, row_bytes // x.itemsize), _KINDS[x.dtype], 0
    swizzle = _SWIZZLE_128 if row_bytes == _SWIZZLED else _PLAIN
    shape, strides = tuple(x.shape), x.stride()
    assert strides[-1] == 1
    return _aligned((x.data_ptr(), swizzle, x.itemsize, kind, block, shape, strides, zeros))


@functools.lru_cache(maxsize=1 << 14)
def _aligned(arguments: Arguments) -> TileMap:
    """Return a descriptor whose memory is aligned. arguments: as for `encoded`."""
    # An H200 reads 10% less where L2 asks for 256 bytes.
    made = encoded(arguments, L2_128)
    if made is None:
        raise RuntimeError(f"the driver makes no descriptor of tiles: {arguments}")
    memory = (ctypes.c_ubyte * (2 * BYTES))()
    begin = -ctypes.addressof(memory) % BYTES
    ctypes.memmove(ctypes.addressof(memory) + begin, made, BYTES)
    return TileMap.from_buffer(memory, begin)


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
    memory = (ctypes.c_ubyte * (2 * BYTES))()
    begin = -ctypes.addressof(memory) % BYTES
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
    return bytes(memory)[begin : begin + BYTES] if error == 0 else None
