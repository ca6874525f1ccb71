"""Acceptance of drafts on a GPU: the kernel that ends the sampling of a step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import next_power_of_2, pdl
from sidestep.kernels.ops.speculation import AcceptedTokens, DraftTables


@triton.jit(do_not_specialize=("width",))
def _accept(
    sampled,
    header,
    valid,
    slots,
    starts,
    marks,
    last_sampled,
    num_computed,
    drafts,
    num_drafts,
    tokens,
    out_ids,
    out_sizes,
    out_drafts,
    out_held,
    out_hits,
    width,
    longest,
    slot_stride,
    drafts_stride,
    tokens_stride,
    ids_stride,
    counts_stride,
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
    start = tl.load(starts + row)
    verified = tl.load(valid + row) - 1
    held = tl.minimum(tl.load(num_drafts + slot * slot_stride), LIMIT)
    query = tl.arange(0, BLOCK)
    first = row * width
    token = tl.load(sampled + first + query, mask=query <= verified, other=-1)
    # Drafts behind the verified ones are read too: the first of them tells what was missed.
    known = query < tl.maximum(held, verified)
    draft = tl.load(drafts + slot * drafts_stride + query, mask=known & (query < LIMIT), other=-1)
    right = (query <= verified) & known & (token == draft)
    hits = tl.min(tl.where(right, BLOCK, query), 0)
    accepted = tl.minimum(hits, verified)
    # Other threads of this program may still have to read the number of drafts.
    tl.debug_barrier()
    new = query <= accepted
    tl.store(last_sampled + slot * slot_stride, tl.sum(tl.where(query == accepted, token, 0), 0))
    tl.store(num_computed + slot * slot_stride, start + accepted + 1)
    tl.store(num_drafts + slot * slot_stride, 0)
    position = start + 1 + query
    tl.store(tokens + slot * tokens_stride + position, token, mask=new & (position < longest))
    out_row = tl.load(header + 1).to(tl.int64)
    tl.store(out_ids + out_row * ids_stride + first + query, token, mask=new)
    counts = out_row * counts_stride + row
    tl.store(out_sizes + counts, accepted + 1)
    tl.store(out_drafts + counts, verified)
    tl.store(out_held + counts, held)
    tl.store(out_hits + counts, hits)


def accept(
    sampled: Tensor,
    *,
    header: Tensor,
    valid: Tensor,
    slots: Tensor,
    starts: Tensor,
    marks: Tensor,
    tables: DraftTables,
    out: AcceptedTokens,
) -> None:
    """Accept drafts as kernels.ops.speculation.accept does, without the host.

    header int32: header[0] rows count, the others are padding; header[1] is the row of the outputs
    to write. The outputs may lie in any memory that the device can write. sampled has the width Q
    of this step, at most one more than the slots' drafts: a graph for smaller steps passes fewer.
    """
    rows = valid.shape[0]
    limit = tables.drafts.shape[1]
    width = sampled.numel() // rows
    assert sampled.is_contiguous() and 1 <= width <= limit + 1, (
        f"{width} tokens a row for {limit} drafts"
    )
    _accept[(rows,)](
        sampled,
        header,
        valid,
        slots,
        starts,
        marks,
        tables.last_sampled,
        tables.num_computed,
        tables.drafts,
        tables.num_drafts,
        tables.tokens,
        out.ids,
        out.sizes,
        out.drafts,
        out.held,
        out.hits,
        width,
        tables.tokens.shape[1],
        tables.num_computed.stride(0),
        tables.drafts.stride(0),
        tables.tokens.stride(0),
        out.ids.stride(0),
        out.sizes.stride(0),
        LIMIT=limit,
        BLOCK=next_power_of_2(limit + 1),
        num_warps=1,
        **pdl(sampled),
    )
