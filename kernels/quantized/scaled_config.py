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
    unroll: int = 2
    """Steps until all threads wait for the tensor cores."""
    block_n: int = 128
    """Rows of W."""
    num_warps: int = 8


_LEAST, _MOST = 65, 512
"""Rows of x for which tiles were measured."""
_STEP = 128
"""Columns of a step."""
_TILES = (
    (ScaledConfig(128), 0.365, 3.7),
    (ScaledConfig(128, 64, stages=5), 0.58, 3.8),
    (ScaledConfig(64, 32, unroll=4), 0.38, 2.8),
    (ScaledConfig(64, unroll=4), 0.29, 2.5),
)
"""Tiles, and microseconds of a step and of a program's beginning and end."""
_LIBRARY = 128, 0.39, 6.0
"""Width of the library's tiles, and its times. No kernel before it lets it start early."""
_SHARING_US, _LEAVING_US, _MOST_SHARING = 6.0, 1.5, 4
"""Time in which programs add what they share, and in which they leave that to the next kernel."""


def scaled_config(
    tokens: int, outputs: int, inputs: int, processors: int, *, leaving: bool = False
) -> ScaledConfig | None:
    """Return the tiles with the least time by a rule, or None if the library takes less.

    A rule: each turn of all processors takes a program's steps. leaving: whether the next kernel
    adds what programs share.
    """
    if not _LEAST <= tokens <= _MOST:
        return None
    steps, sharing_us = -(-inputs // _STEP), _LEAVING_US if leaving else _SHARING_US
    width, step_us, ends_us = _LIBRARY
    turns = _turns(-(-outputs // width) * -(-tokens // width), processors)
    best, least = None, turns * steps * step_us + ends_us
    for given, step_us, ends_us in _TILES:
        tiles = -(-outputs // given.block_n) * -(-tokens // (given.rows + given.more))
        for split in (1, 2, _MOST_SHARING):
            if split > 1 and tiles * split > processors:
                break
            turns = _turns(tiles * split, processors)
            took = turns * (-(-steps // split) * step_us + ends_us) + sharing_us * (split > 1)
            if took < least:
                best, least = replace(given, split=split), took
    return best


def _turns(programs: int, processors: int) -> int:
    """Return the turns of all processors that programs take."""
    return -(-programs // processors)
