"""Look-up of drafts on a GPU: the longest earlier match of a slot's last tokens.

There are two kernels, whose grids follow from the padded shapes alone, so that a CUDA graph can
hold them:

1. `_match`, some programs for each row, compares the last tokens with each place of its tiles. The
   best place goes to the slot's word of scratch, by an atomic maximum of (length of the match, end
   of the match). A maximum does not depend on the order of programs.
2. `_copy_drafts`, a program for each row, copies the tokens behind the best place to the slot's
   drafts, and clears the word.

A comparison goes back from the last token and ends when no place of the tile is left, mostly after
one to three tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.ops.speculation import DraftTables

_TILE = 1024
"""Places that a program compares at a time."""
_MOST_PROGRAMS = 64
"""Most programs of a row."""
_ALL_PROGRAMS = 2048
"""Programs of all rows, about: as many as a large GPU holds at once."""


def _num_programs(rows: int, longest: int) -> int:
    """Return the number of programs of a row; their tiles alternate."""
    share = max(4, _ALL_PROGRAMS // rows)
    return min(_MOST_PROGRAMS, share, cdiv(longest, _TILE))


@triton.jit
def _length_and_room(
    slot,
    num_computed,
    draft_limit,
    max_total,
    longest,
    slot_stride,
    limits_stride,
    LIMIT: tl.constexpr,
):
    """Return the number of a slot's known tokens, and how many drafts it may have."""
    length = tl.load(num_computed + slot * slot_stride) + 1
    limits = slot * limits_stride
    room = tl.minimum(tl.load(draft_limit + limits), tl.load(max_total + limits) - length)
    room = tl.minimum(room, LIMIT)
    return length, tl.where(length <= longest, tl.maximum(room, 0), 0)


@triton.jit
def _match(
    header,
    slots,
    marks,
    num_computed,
    tokens,
    draft_limit,
    max_total,
    scratch,
    longest,
    slot_stride,
    limits_stride,
    tokens_stride,
    min_match,
    max_match,
    LIMIT: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(header):
        return
    if tl.load(marks + row) == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    length, room = _length_and_room(
        slot, num_computed, draft_limit, max_total, longest, slot_stride, limits_stride, LIMIT
    )
    first = tl.program_id(1) * TILE
    if (room == 0) | (first >= length - 1):
        return
    tokens += slot * tokens_stride
    best = tl.full((), 0, tl.int64)
    for tile in range(first, length - 1, tl.num_programs(1) * TILE):
        place = tile + tl.arange(0, TILE)  # of the last token of a match
        alike = (place < length - 1).to(tl.int32)
        matched = tl.zeros((TILE,), tl.int32)
        back = 0
        while back < max_match:
            wanted = tl.load(tokens + length - 1 - back)
            inside = (alike != 0) & (place >= back)
            found = tl.load(tokens + place - back, mask=inside, other=0)
            alike = (inside & (found == wanted)).to(tl.int32)
            matched += alike
            back = tl.where(tl.max(alike, 0) != 0, back + 1, max_match)
        rank = (matched.to(tl.int64) << 32) | (place + 1).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched >= min_match, rank, 0), 0))
    if best > 0:
        tl.atomic_max(scratch + slot, best)


@triton.jit
def _copy_drafts(
    header,
    slots,
    marks,
    num_computed,
    drafts,
    num_drafts,
    tokens,
    draft_limit,
    max_total,
    scratch,
    longest,
    slot_stride,
    limits_stride,
    drafts_stride,
    tokens_stride,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(header):
        return
    if tl.load(marks + row) == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    length, room = _length_and_room(
        slot, num_computed, draft_limit, max_total, longest, slot_stride, limits_stride, LIMIT
    )
    best = tl.load(scratch + slot)
    count = tl.where(best > 0, room, 0)
    after = (best & 0xFFFFFFFF).to(tl.int32)
    draft = tl.arange(0, BLOCK)
    # Behind the known tokens the drafts continue themselves: the last tokens are repeated.
    index = after + draft % tl.maximum(length - after, 1)
    token = tl.load(tokens + slot * tokens_stride + index, mask=draft < count, other=0)
    # Other threads of this program may still have to read the word.
    tl.debug_barrier()
    tl.store(scratch + slot, tl.full((), 0, tl.int64))
    tl.store(drafts + slot * drafts_stride + draft, token, mask=draft < count)
    tl.store(num_drafts + slot * slot_stride, count)


def look_up_drafts(
    *,
    header: Tensor,
    slots: Tensor,
    marks: Tensor,
    tables: DraftTables,
    scratch: Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Look up drafts as kernels.ops.speculation.look_up_drafts does, without the host.

    header int32: header[0] rows count, the others are padding. slots, marks int32 [R]. scratch
    int64 [S]: zeros, before and after. 1 <= min_match <= max_match.
    """
    assert 1 <= min_match <= max_match, f"matches of {min_match} to {max_match} tokens"
    rows, limit, longest = slots.shape[0], tables.drafts.shape[1], tables.tokens.shape[1]
    _match[(rows, _num_programs(rows, longest))](
        header,
        slots,
        marks,
        tables.num_computed,
        tables.tokens,
        tables.draft_limit,
        tables.max_total,
        scratch,
        longest,
        tables.num_computed.stride(0),
        tables.max_total.stride(0),
        tables.tokens.stride(0),
        min_match,
        max_match,
        LIMIT=limit,
        TILE=_TILE,
        num_warps=4,
        **pdl(slots),
    )
    _copy_drafts[(rows,)](
        header,
        slots,
        marks,
        tables.num_computed,
        tables.drafts,
        tables.num_drafts,
        tables.tokens,
        tables.draft_limit,
        tables.max_total,
        scratch,
        longest,
        tables.num_computed.stride(0),
        tables.max_total.stride(0),
        tables.drafts.stride(0),
        tables.tokens.stride(0),
        LIMIT=limit,
        BLOCK=next_power_of_2(limit),
        num_warps=1,
        **pdl(slots),
    )
