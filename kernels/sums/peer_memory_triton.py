"""Memory that ranks share: each has a *space*, of the same layout, that all of them can read and
write.

A space is flags, then places for what a rank has to add (kernels.all_reduce_triton), then areas for
what other ranks push (kernels.pushed_sum_triton): one for each rank and turn, in which every 4
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
"""One of each program for meetings, one for pushed sums."""
PLACES = 3
TURNS = 2
MOST_PUSHED_BYTES = 1 << 16
"""Of a part. Areas take four times as much of each rank's space for each rank."""
_ALIGNED = 256


@dataclass(frozen=True)
class PeerMemory:
    """This rank's space, and where it finds those of all ranks. It begins as zeros on all of
    them.
    """

    rank: int
    addresses: tuple[int, ...]
    """Of each rank's space, as this rank sees it."""
    own: Tensor
    """uint8 [space_bytes(ranks, place_bytes)]"""
    counters: Tensor
    """int64 [NUM_COUNTERS], zeros at first; this rank's alone."""
    place_bytes: int
    programs: int
    """How many programs fit on every rank's device at once; at most MAX_PROGRAMS."""

    def part(self, place: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] at this place of the own space, for what this rank has to add."""
        first, size = self.offset(place), rows * width * dtype.itemsize
        assert 0 <= place < PLACES and size <= self.place_bytes, (
            f"{rows} x {width} of {dtype} in place {place}"
        )
        return self.own[first : first + size].view(dtype).view(rows, width)

    def offset(self, place: int) -> int:
        """Bytes from a space's beginning; the areas begin behind the last place."""
        return _flag_bytes(len(self.addresses)) + place * self.place_bytes

    @property
    def area_bytes(self) -> int:
        """Of the area that one rank pushes one turn's part into."""
        return _area_bytes(self.place_bytes)


def space_bytes(ranks: int, place_bytes: int) -> int:
    """Size of a space. place_bytes: a multiple of 256."""
    assert place_bytes % _ALIGNED == 0, f"{place_bytes} bytes"
    return _flag_bytes(ranks) + PLACES * place_bytes + TURNS * ranks * _area_bytes(place_bytes)


def aligned(num_bytes: int) -> int:
    """As many bytes, or a few more, as places have them."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _flag_bytes(ranks: int) -> int:
    return aligned(8 * MAX_PROGRAMS * ranks)


def _area_bytes(place_bytes: int) -> int:
    return 2 * min(place_bytes, MOST_PUSHED_BYTES)


@triton.jit
def space_of(spaces, peer, RANKS: tl.constexpr):
    """The address of a rank's space, or of several ranks'."""
    address = tl.zeros_like(peer).to(tl.int64)
    for rank in tl.static_range(RANKS):
        address = tl.where(peer == rank, spaces[rank], address)
    return address
