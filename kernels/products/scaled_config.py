"""Tiles of the product of rows and a matrix that both are in e4m3.

They are apart from the kernel, because not every version of Triton has the kernel's language.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ScaledConfig:
    """Tile of a program, and the part of its columns that is loading at once."""

    rows: int
    """Rows of x."""
    more: int = 0
    """Rows of x of a second piece of the tile; 0 without one."""
    stages: int = 6
    """Number of tiles in the ring."""
    split: int = 1
    """Number of programs that share a tile's columns."""
    unroll: int = 8
    """Steps until all threads wait for the tensor cores."""
    block_n: int = 128
    """Rows of W."""
    num_warps: int = 8


_LEAST, _MOST = 33, 512
"""Rows of x for which tiles were measured."""
_STEP = 128
"""Columns of a step."""
_TILES = (
    (ScaledConfig(128), 1, 0.38, 2.2),
    (ScaledConfig(128, 64, stages=5), 1, 0.54, 1.9),
    (ScaledConfig(64, 32), 1, 0.37, 2.2),
    (ScaledConfig(64), 1, 0.28, 1.6),
    # Smaller rings leave room for two programs on a processor.
    (ScaledConfig(64, stages=4, unroll=4), 1, 0.31, 1.5),
    (ScaledConfig(64, stages=4, unroll=4), 2, 0.5, 2.2),
    (ScaledConfig(128, stages=4, block_n=64, num_warps=4), 1, 0.31, 1.8),
    (ScaledConfig(128, stages=4, block_n=64, num_warps=4), 2, 0.46, 2.5),
)
"""Tiles, the programs of a processor, and microseconds: of a step of all of these programs, and of
a program's beginning and end."""
_LIBRARY, _LIBRARY_TILE = (0.34, 2.0), 128
_START_US, _PARTLY = 1.0, 1.1
"""Time in which the library's kernel starts: no kernel before it lets it start early. And by how
much it is slower for rows that fill no tile."""
_MOST_SHARING, _SHARING_US = 4, 2.2
"""Programs that share a tile at most, and the time in which they wait for one another."""


def scaled_config(
    tokens: int, outputs: int, inputs: int, processors: int, *, leaving: bool = False
) -> ScaledConfig | None:
    """Return the tiles with the least time by a rule, or None if the library takes less.

    The rule: each turn of all processors takes a program's steps. leaving: whether the next kernel
    adds what programs share.
    """
    if not _LEAST <= tokens <= _MOST:
        return None
    steps = -(-inputs // _STEP)
    best, least = None, _library_us(tokens, outputs, steps, processors)
    for given, each, step_us, ends_us in _TILES:
        tiles = -(-outputs // given.block_n) * -(-tokens // (given.rows + given.more))
        for split in (1, 2, _MOST_SHARING):
            if split > 1 and tiles * split > processors:
                break
            turns = -(-tiles * split // (processors * each))
            took = turns * (-(-steps // split) * step_us + ends_us)
            if split > 1:
                # Sums are written and read once more.
                took += 8 * tokens * outputs * split / 3e6 + 0.7 * split
                took += _SHARING_US * (not leaving)
            if took < least:
                best, least = replace(given, split=split), took
    return best


def _library_us(tokens: int, outputs: int, steps: int, processors: int) -> float:
    """Return the time of the library's product by the same rule."""
    tiles = -(-outputs // _LIBRARY_TILE) * -(-tokens // _LIBRARY_TILE)
    step_us, ends_us = _LIBRARY
    took = -(-tiles // processors) * (steps * step_us + ends_us)
    return took * (_PARTLY if tokens % _LIBRARY_TILE else 1.0) + _START_US
