"""Plan of decode attention of few rows: the work of each program, listed on the device once a step.

A program so finds all that it needs to ask for its first keys in one place, with one load. Rows
are listed behind the programs, for those that add their parts up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import next_power_of_2, pdl
from sidestep.kernels.launch_order import completes

COLUMNS = 8
"""Columns of the list of parts: row, slot, length, first tile, end of tiles, nothing, block of the
first tile, and block of the next one. The list of rows comes behind it: row, slot, length, first
part, end of parts, and nothing. The row is negative if there is no work."""


@completes("work")
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _plan_few(
    tile_ends,
    seq_lens,
    slots,
    block_tables,
    work,
    num_rows,
    table_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    ends = tl.load(tile_ends + rows)
    before = tl.load(tile_ends + rows - 1, mask=rows > 0, other=0)
    lengths = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=0)
    firsts = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        firsts = tl.maximum(lengths - WINDOW, 0) // TILE
    # The new token is in no tile: a row of one token has none.
    exists = ends > before
    tiles = tl.where(exists, tl.cdiv(lengths - 1, TILE) - firsts, 0)
    total = tl.sum(tiles, 0)
    # All parts but the rows' last ones have the same number of tiles: the least that is tried with
    # which PARTS are enough. The most that may be needed is among those that are tried.
    least = tl.maximum(tl.cdiv(total, PARTS), MIN_TILES)
    most = tl.maximum(tl.cdiv(total, PARTS - ROWS), least)
    sizes = least + tl.cdiv(most - least, ROWS - 1) * rows
    needed = tl.sum(tl.cdiv(tiles[None, :], sizes[:, None]), 1)
    quota = tl.min(tl.where(needed <= PARTS, sizes, most), 0)
    part_counts = tl.cdiv(tiles, quota)
    part_ends = tl.cumsum(part_counts, 0)
    place = work + (PARTS + rows) * 8
    tl.store(place, tl.where(exists, rows, -1))
    tl.store(place + 1, slot)
    tl.store(place + 2, lengths)
    tl.store(place + 3, part_ends - part_counts)
    tl.store(place + 4, part_ends)
    # By part.
    part = tl.arange(0, SIZE)
    behind = part_ends[None, :] <= part[:, None]
    row = tl.sum(behind.to(tl.int32), 1)
    first_part = tl.max(tl.where(behind, part_ends[None, :], 0), 1)
    own = rows[None, :] == row[:, None]
    length = tl.sum(tl.where(own, lengths[None, :], 0), 1)
    own_slot = tl.sum(tl.where(own, slot[None, :], 0), 1)
    first = tl.sum(tl.where(own, firsts[None, :], 0), 1)
    end = first + tl.sum(tl.where(own, tiles[None, :], 0), 1)
    there = row < ROWS
    tile = first + (part - first_part) * quota
    stop = tl.minimum(tile + quota, end)
    table = block_tables + own_slot.to(tl.int64) * table_stride
    last = stop - 1
    block = tl.load(table + tile * TILE // PAGE, mask=there, other=0)
    following = tl.load(table + tl.minimum(tile + 1, last) * TILE // PAGE, mask=there, other=0)
    place, listed = work + part * 8, part < PARTS
    tl.store(place, tl.where(there, row, -1), mask=listed)
    tl.store(place + 1, own_slot, mask=listed)
    tl.store(place + 2, length, mask=listed)
    tl.store(place + 3, tl.where(there, tile, 0), mask=listed)
    tl.store(place + 4, tl.where(there, stop, 0), mask=listed)
    tl.store(place + 6, block, mask=listed)
    tl.store(place + 7, following, mask=listed)


def plan_few(
    tile_ends: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    work: Tensor,
    *,
    tile: int,
    page: int,
    window: int,
    min_tiles: int,
) -> None:
    """List the work of the programs of each head.

    tile_ends: from plan_attention, with any tile; it only tells which rows there are. work int32
    [parts + rows, COLUMNS], written: there are at least twice as many parts as tile_ends has rows.
    """
    rows = len(tile_ends)
    parts = len(work) - rows
    assert 2 * rows <= parts, "too many rows"
    _plan_few[(1,)](
        tile_ends,
        seq_lens,
        slots,
        block_tables,
        work,
        len(seq_lens),
        block_tables.stride(0),
        parts,
        next_power_of_2(parts),
        tile,
        page,
        window,
        rows,
        min_tiles,
        num_warps=4,
        **pdl(work),
    )
