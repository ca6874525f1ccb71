"""Rows of decode attention: where their blocks, queries and sinks are."""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.attention.common.scores_triton import LOG2_E


@triton.jit
def blocks_of(table, index, within, length, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the block id of a tile, or of each of its keys where a tile has several blocks."""
    if PAGE % TILE == 0:
        block = tl.load(table + index * TILE // PAGE)
    else:
        keys = index * TILE + within
        block = tl.load(table + keys // PAGE, mask=keys < length, other=0)
    return block.to(tl.int64)


@triton.jit
def row_at(
    row,
    there,
    tile_ends,
    seq_lens,
    valid_lens,
    slots,
    block_tables,
    table_stride,
):
    """Return the end of a row's last tile, its length, valid length and table.

    They are any values if not `there`.
    """
    slot = tl.load(slots + row, mask=there, other=0)
    end = tl.load(tile_ends + row, mask=there, other=0)
    length = tl.load(seq_lens + row, mask=there, other=0)
    valid = length
    if valid_lens is not None:
        valid = tl.load(valid_lens + row, mask=there, other=0)
    return end, length, valid, block_tables + slot.to(tl.int64) * table_stride


@triton.jit
def place_of(m, stride, G: tl.constexpr, D: tl.constexpr, Q: tl.constexpr):
    """Return the places of rows of queries, from a row's first token and KV head.

    Row m of the products is head m % G of query token m // G.
    """
    return m * D if Q == 1 else (m // G) * stride + (m % G) * D


@triton.jit
def sink_mass(sinks, m, top, G: tl.constexpr, Q: tl.constexpr):
    """Return the masses of rows' sinks, where `top` has the mass 1.

    A row whose sink is so far above its keys that the mass is infinite gets the result 0.
    """
    sink = tl.load(sinks + m % G, mask=m < G * Q, other=0.0) * LOG2_E
    return tl.exp2(sink - top)
