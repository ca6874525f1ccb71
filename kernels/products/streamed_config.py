"""Configuration of the streamed product.

It is apart from the kernel, because not every version of Triton has the kernel's language.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
ALIGNED = 8
"""Columns of W must be a multiple of this: the copy engine needs rows at multiples of 16 bytes."""
_RING_BYTES = 200 << 10
_PROCESSORS = 132
BLOCK_N = 64
"""Rows of W of a program (of each half, if gated): the number that tensor cores take at once."""


@dataclass(frozen=True)
class StreamedConfig:
    """Partition of W, and the part of it that is loading at once."""

    block_k: int
    """Columns of a tile."""
    stages: int
    """Number of tiles in the ring."""
    split: int = 1
    """Number of programs that share a tile's columns."""
    block_n: int = BLOCK_N


@dataclass(frozen=True)
class OneRowConfig:
    """Partition of coded W among warps, for one row. All of it is in shared memory at once."""

    split: int
    """Warps that share a tile's columns."""
    groups: int = 1
    """Tiles of 16 rows of W of a program."""

    @property
    def block_n(self) -> int:
        """Outputs of a program."""
        return self.groups * 16


def config(tokens: int, num_outputs: int, num_inputs: int, gated: bool) -> StreamedConfig:
    """Return a ring that fills shared memory, and a split for at most one wave of programs.

    The ring fills a processor's shared memory. There are programs for at most one turn of all
    processors, or as many as there are tiles. This was the best choice, or within a percent of it,
    for all sizes tried.
    """
    rows = padded(tokens)
    block_k = 128
    stage = 2 * (BLOCK_N * (1 + gated) + rows) * block_k
    if _RING_BYTES // stage < 4:
        block_k, stage = 64, stage // 2
    tiles, steps = -(-num_outputs // BLOCK_N), -(-num_inputs // block_k)
    split = 1
    while 2 * split * tiles <= _PROCESSORS and 4 * split <= steps:
        split *= 2
    return StreamedConfig(block_k, max(2, min(10, _RING_BYTES // stage, -(-steps // split))), split)


def padded(tokens: int) -> int:
    """Return the rows of x in a tile: a power of two, and at least the 8 that tensor cores need."""
    return max(8, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True)
class WideConfig:
    """Tile of a program of the product of many rows with a matrix of codes."""

    block_n: int
    """Rows of W."""
    rows: int
    """Rows of x."""
    stages: int
    """Number of tiles in the ring."""
    split: int = 1
    """Number of programs that share a tile's columns."""
    num_warps: int = 8
    unroll: int = 2
    """Steps that are multiplied before all threads wait for the tensor cores."""
    step: int = 128
    """Columns of a tile in the ring."""
    more: int = 0
    """Rows of x of a second piece of the tile; 0 without one."""
