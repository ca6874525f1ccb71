"""The state rows that rows begin from, where only the device knows how many drafts were accepted.

It runs behind the first kernel of a step, in models with recurrent layers and with speculation. The
state after a draft lies behind that of the token before (kernels/recurrent/state_rows.py). So the
tokens that a slot has computed beyond the settled ones of its last row say where its state is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.launch_order import completes

_BLOCK = 128
"""Rows of a program."""


@completes("begins")
@triton.jit(do_not_specialize=("slot_stride",))
def _begin_states(
    header,
    slots,
    starts,
    num_computed,
    first_rows,
    settled,
    settled_at,
    begins,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < tl.load(header)
    slot = tl.load(slots + row, mask=there, other=0).to(tl.int64)
    given = tl.load(starts + row, mask=there, other=0)
    goes_on = there & (given < 0)
    start = tl.load(num_computed + slot * slot_stride, mask=goes_on, other=0)
    accepted = start - tl.load(settled_at + slot, mask=goes_on, other=0)
    # A row behind its request's end, which is dropped, must not reach another state either.
    accepted = tl.where(goes_on, tl.minimum(tl.maximum(accepted, 0), WIDTH - 1), 0)
    tl.store(begins + row, tl.load(first_rows + row, mask=there, other=0) + accepted, mask=there)
    start = tl.where(goes_on, start, given)
    after = start + tl.load(settled + row, mask=there, other=0)
    tl.store(settled_at + slot, after, mask=there)


def begin_states(
    begins: Tensor,
    first_rows: Tensor,
    *,
    header: Tensor,
    slots: Tensor,
    starts: Tensor,
    settled: Tensor,
    num_computed: Tensor,
    settled_at: Tensor,
    width: int,
) -> None:
    """Write the state row that each row begins from, and note where its settled tokens end.

    All are int32. begins [R]: written. first_rows [R]: the first state row of each row's state; -1
    for a new sequence. header[0]: rows that count. slots [R]. starts [R]: the position of each
    row's first token; -1 where drafts may have come before it. settled [R]: see StateRows.
    num_computed [slots]: tokens of each slot that count. settled_at [slots]: the position behind
    the settled tokens of the slot's last row; read and written. width: state rows of a state.
    """
    rows = slots.shape[0]
    _begin_states[(cdiv(rows, _BLOCK),)](
        header,
        slots,
        starts,
        num_computed,
        first_rows,
        settled,
        settled_at,
        begins,
        num_computed.stride(0),
        width,
        _BLOCK,
        num_warps=4,
        **pdl(begins),
    )
