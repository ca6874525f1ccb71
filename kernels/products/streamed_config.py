"""The streamed product's configuration; apart from its kernel, whose language not every Triton
has.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
ALIGNED = 8
"""Columns of W must be a multiple of this many: the copy engine wants rows at multiples of 16
bytes."""
_RING_BYTES = 200 << 10
_PROCESSORS = 132
BLOCK_N = 64
"""Rows of W of a program (of each half, if gated): what tensor cores take at once."""
MOST_PARTIALS = 2 * _PROCESSORS * BLOCK_N * MAX_ROWS
"""Sums that programs which share their columns leave for one another, in float32."""


@dataclass(frozen=True)
class StreamedConfig:
    """How W is cut, and how much of it is on its way at once."""

    block_k: int
    """Columns of a tile."""
    stages: int
    """Tiles in the ring."""
    split: int = 1
    """Programs that share a tile's columns."""
    block_n: int = BLOCK_N


def config(tokens: int, num_outputs: int, num_inputs: int, gated: bool) -> StreamedConfig:
    """A ring that fills a processor's shared memory, and programs for at most one turn of all
    processors, or as many as there are tiles: what was best, or within a percent of it, for all
    sizes tried.
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
    """Rows of x in a tile: a power of two, and what tensor cores take at least."""
    return max(8, 1 << (tokens - 1).bit_length())
