"""Plan of a step's attention: the tiles of its rows, counted on the device once a step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.launch_order import completes


@completes("decode_ends", "prefill_ends")
@triton.jit(do_not_specialize=["first", "count"])
def _plan(
    seq_lens,
    query_starts,
    header,
    decode_ends,
    prefill_ends,
    first,
    count,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    Q: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    num_rows = tl.minimum(tl.load(header) - first, count)
    num_decode = tl.minimum(tl.load(header + 1) - first, count)
    decodes = rows < num_decode
    length = tl.load(seq_lens + rows, mask=decodes, other=0)
    tiles = tl.cdiv(length, TILE)
    if WINDOW:
        # The first of a row's queries sees the first key.
        tiles -= tl.maximum(length - (Q - 1) - WINDOW, 0) // TILE
    tl.store(decode_ends + rows, tl.cumsum(tl.where(decodes, tiles, 0), 0))
    prefills = (rows >= num_decode) & (rows < num_rows)
    start = tl.load(query_starts + rows, mask=prefills, other=0)
    stop = tl.load(query_starts + rows + 1, mask=prefills, other=0)
    tl.store(
        prefill_ends + rows, tl.cumsum(tl.where(prefills, tl.cdiv(stop - start, TOKENS), 0), 0)
    )


def plan_attention(
    seq_lens: Tensor,
    query_starts: Tensor,
    header: Tensor,
    decode_ends: Tensor,
    prefill_ends: Tensor,
    *,
    tile: int,
    tokens: int,
    window: int,
    queries: int = 1,
    first: int = 0,
) -> None:
    """Store, cumulatively by row, the numbers of tiles of both kinds of rows.

    Decode rows have tiles of keys; the other rows have tiles of query tokens.

    seq_lens int32 [R]; query_starts int32 [R + 1]; header int32: header[0] is the number of rows,
    header[1] of them are decode rows and come first; decode_ends, prefill_ends int32, written:
    their size is a power of two, at least R. queries: query tokens of each decode row. first: the
    first of these rows among those that the header counts.
    """
    _plan[(1,)](
        seq_lens,
        query_starts,
        header,
        decode_ends,
        prefill_ends,
        first,
        seq_lens.shape[0],
        tile,
        tokens,
        window,
        queries,
        decode_ends.shape[0],
        num_warps=4,
        **pdl(seq_lens),
    )
