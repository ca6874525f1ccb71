"""The gated delta rule for rows of few tokens in Triton, one token after the other.

A program has some columns of one head's state. It reads them once, computes all tokens of its row,
and writes them after the last token that is no draft, after each draft, and after each token that
asks for a save. The reference is kernels/ops/gated_delta.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.recurrent.delta_tokens_triton import (
    log_decay,
    offset_of,
    unit_factor,
    write_strength,
)
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows

_COLUMNS = 32
"""Columns of a state that a program has."""


@triton.jit
def _few_tokens(
    qkv,
    ba,
    a_log,
    bias,
    state,
    query_starts,
    state_in,
    state_out,
    settled,
    save_starts,
    save_offsets,
    save_rows,
    out,
    qkv_stride,
    ba_stride,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + row).to(tl.int64)
    count = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    if (count == 0) | (count > MOST):
        return
    keys, columns = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    cells = head * (DK * DV) + keys[:, None] * DV + columns[None, :]
    inside = (keys[:, None] < DK) & (columns[None, :] < DV)
    begin = tl.load(state_in + row).to(tl.int64)
    known = (keys[:, None] < tl.where(begin >= 0, DK, 0)) & (columns[None, :] < DV)
    memory = tl.load(state + begin * (HV * DK * DV) + cells, mask=known, other=0.0)
    key_head = head // (HV // HK)
    save, last_save = tl.load(save_starts + row), tl.load(save_starts + row + 1)
    next_save = offset_of(save_offsets, save, last_save)
    end, sure = tl.load(state_out + row).to(tl.int64), tl.load(settled + row)
    first_end = tl.where(end >= 0, sure, MOST + 1)
    for i in range(count):
        source = qkv + (first + i) * qkv_stride
        q = tl.load(source + key_head * DK + keys, mask=keys < DK, other=0.0).to(tl.float32)
        k = tl.load(source + (HK + key_head) * DK + keys, mask=keys < DK, other=0.0).to(tl.float32)
        values = source + 2 * HK * DK + head * DV + columns
        v = tl.load(values, mask=columns < DV, other=0.0).to(tl.float32)
        q, k = q * (unit_factor(q, eps, 0) * (DK**-0.5)), k * unit_factor(k, eps, 0)
        gates = ba + (first + i) * ba_stride
        memory *= tl.exp(log_decay(gates, head, True, a_log, bias, HV))
        change = (v - tl.sum(memory * k[:, None], 0)) * write_strength(gates, head, True)
        memory += k[:, None] * change[None, :]
        attended = tl.sum(memory * q[:, None], 0).to(out.dtype.element_ty)
        tl.store(out + (first + i) * (HV * DV) + head * DV + columns, attended, mask=columns < DV)
        while next_save == i + 1:
            target = tl.load(save_rows + save).to(tl.int64) * (HV * DK * DV)
            tl.store(state + target + cells, memory, mask=inside)
            save += 1
            next_save = offset_of(save_offsets, save, last_save)
        if i + 1 >= first_end:
            target = (end + (i + 1 - sure)) * (HV * DK * DV)
            tl.store(state + target + cells, memory, mask=inside)


def compute_few_tokens(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    bias: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
    out: Tensor,
) -> None:
    """Write the outputs [T, Hv * Dv] of the rows with up to FEW_TOKENS, and their states.

    Rows of qkv and ba are contiguous.
    """
    _, heads, key_dim, value_dim = state.shape
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    _few_tokens[(len(rows.state_in), heads, triton.cdiv(value_dim, columns))](
        qkv,
        ba,
        a_log,
        bias,
        state,
        rows.query_starts,
        rows.state_in,
        rows.state_out,
        rows.settled,
        rows.save_starts,
        rows.save_offsets,
        rows.save_rows,
        out,
        qkv.stride(0),
        ba.stride(0),
        eps,
        key_heads,
        heads,
        key_dim,
        value_dim,
        triton.next_power_of_2(key_dim),
        columns,
        FEW_TOKENS,
        num_warps=2,
        **pdl(qkv),
    )
