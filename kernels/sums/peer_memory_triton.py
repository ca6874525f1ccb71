"""Memory that ranks share: each rank has a *space* that all of them can read and write.

All spaces have the same layout: flags, then buffers for the parts that a rank adds
(kernels/sums/all_reduce_triton.py), then areas for the words that other ranks push
(kernels/sums/pushed_sum_triton.py). There is one area for each rank and turn, in which every 4
bytes of data take 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 128
NUM_COUNTERS = 2 * MAX_PROGRAMS
"""Number of counters: for each program one for barriers and one for pushed sums."""
NUM_BUFFERS = 3
TURNS = 2
MOST_PUSHED_BYTES = 1 << 16
"""Largest part that is pushed, in bytes. Areas take 4 times as much of each space for each rank."""
_ALIGNED = 256


@dataclass(frozen=True)
class PeerMemory:
    """This rank's space, and the addresses of all ranks' spaces, which begin as zeros."""

    rank: int
    addresses: tuple[int, ...]
    """Address of each rank's space, as this rank sees it."""
    own: Tensor
    """uint8 [space_bytes(ranks, buffer_bytes)]: this rank's space."""
    counters: Tensor
    """int64 [NUM_COUNTERS], zeros at first; only this rank uses them."""
    buffer_bytes: int
    programs: int
    """Number of programs that fit on every rank's device at once; at most MAX_PROGRAMS."""

    def part(self, buffer: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return the part [rows, width] that this rank adds, in this buffer of its own space."""
        first, size = self.offset(buffer), rows * width * dtype.itemsize
        assert 0 <= buffer < NUM_BUFFERS and size <= self.buffer_bytes, (
            f"{rows} x {width} of {dtype} in buffer {buffer}"
        )
        return self.own[first : first + size].view(dtype).view(rows, width)

    def offset(self, buffer: int) -> int:
        """Return a buffer's offset in a space, in bytes; the areas begin behind the last buffer."""
        return _flag_bytes(len(self.addresses)) + buffer * self.buffer_bytes

    @property
    def area_bytes(self) -> int:
        """Bytes of the area into which one rank pushes one turn's part."""
        return _area_bytes(self.buffer_bytes)


def space_bytes(ranks: int, buffer_bytes: int) -> int:
    """Return the bytes of a space. buffer_bytes must be a multiple of 256."""
    assert buffer_bytes % _ALIGNED == 0, f"{buffer_bytes} bytes"
    return (
        _flag_bytes(ranks) + NUM_BUFFERS * buffer_bytes + TURNS * ranks * _area_bytes(buffer_bytes)
    )


def aligned(num_bytes: int) -> int:
    """Return num_bytes rounded up to a size that a buffer can have, in bytes."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _flag_bytes(ranks: int) -> int:
    return aligned(8 * MAX_PROGRAMS * ranks)


def _area_bytes(buffer_bytes: int) -> int:
    return 2 * min(buffer_bytes, MOST_PUSHED_BYTES)


@triton.jit
def space_of(spaces, peer, RANKS: tl.constexpr):
    """Return the address of a rank's space, or of several ranks' spaces."""
    address = tl.zeros_like(peer).to(tl.int64)
    for rank in tl.static_range(RANKS):
        address = tl.where(peer == rank, spaces[rank], address)
    return address
