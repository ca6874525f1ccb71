"""Which row, and which of its tokens, a program of a launch over ragged rows has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(query_starts, rows, index, at_least, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Return the row of the index-th tile of TILE tokens, its place in the row, and the row.

    Tiles are counted over the rows with more than `at_least` tokens, and begin anew in each row.
    The result is the row's index, the tile's index in it, the row's first token and the number of
    its tokens. The row is `rows` or more where there are fewer tiles. ROWS: at least `rows`.
    """
    every = tl.arange(0, ROWS)
    starts = tl.load(query_starts + every, mask=every < rows, other=0)
    counts = tl.load(query_starts + every + 1, mask=every < rows, other=0) - starts
    tiles = tl.where(counts > at_least, (counts + TILE - 1) // TILE, 0)
    ends = tl.cumsum(tiles, 0)
    row = tl.sum((ends <= index).to(tl.int32), 0)
    own = every == row
    tile = index - tl.sum(tl.where(own, ends - tiles, 0), 0)
    first = tl.sum(tl.where(own, starts, 0), 0)
    return row, tile, first.to(tl.int64), tl.sum(tl.where(own, counts, 0), 0)
