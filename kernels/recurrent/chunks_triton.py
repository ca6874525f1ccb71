"""The gated delta rule for rows of many tokens in Triton, by chunks.

A first kernel solves the triangular system of each chunk and head, side by side. A second one goes
through the chunks of a row, with some columns of a head's state in its registers. Where states are
saved within a row, it leaves the state before the chunk in the state row of the chunk's first save,
and a third kernel goes on from there, so that the second one has a loop without branches. The
reference is kernels/ops/gated_delta.py. Products are of the inputs' type, with sums in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.recurrent.delta_tokens_triton import (
    log_decay,
    offset_of,
    unit_factor,
    write_strength,
)
from sidestep.kernels.recurrent.row_tiles_triton import find_tile
from sidestep.kernels.recurrent.state_rows import CHUNK, FEW_TOKENS, StateRows

_COLUMNS = 32
"""Columns of a state that a program has."""
_WARPS = 8
"""Warps of a program. With four, Triton 3.6 gives the tensor cores wrong numbers in 16 bits."""


@triton.jit
def _inverse(a, N: tl.constexpr):
    """Return the inverse of 1 + a, [N, N], for a strictly lower triangular; N is four times 16.

    Powers of `a` would be huge where keys repeat, so the blocks on the diagonal are solved row by
    row. With their inverse D and the blocks below them B, the inverse of 1 + a is that of 1 + D B,
    whose fourth power ends, times D.
    """
    B: tl.constexpr = N // 4
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    diagonal = (i // B) == (j // B)
    x = -tl.sum(tl.reshape(tl.where(diagonal, a, 0.0), [4, B, 4, B]), 2)
    places = tl.arange(0, B)[None, :, None]
    for at in range(1, B):
        own = tl.sum(tl.where(places == at, x, 0.0), 1)
        more = tl.sum(own[:, :, None] * x, 1)
        x += tl.where(places == at, more[:, None, :], 0.0)
    x += tl.where(places == tl.arange(0, B)[None, None, :], 1.0, 0.0)
    spread = tl.reshape(tl.broadcast_to(x[:, :, None, :], [4, B, 4, B]), [N, N])
    solved = tl.where(diagonal, spread, 0.0)
    below = tl.dot(solved, tl.where(diagonal, 0.0, a), input_precision="tf32x3")
    squared = tl.dot(below, below, input_precision="tf32x3")
    part = tl.where(i == j, 1.0, 0.0) - below
    part += tl.dot(part, squared, input_precision="tf32x3")
    return tl.dot(part, solved, input_precision="tf32x3")


@triton.jit
def _chunk_systems(
    qkv,
    ba,
    a_log,
    bias,
    query_starts,
    save_starts,
    save_offsets,
    save_rows,
    written,
    read,
    attention,
    decay,
    units,
    save_at,
    qkv_stride,
    ba_stride,
    rows,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    SAVES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk, first, count = find_tile(query_starts, rows, tl.program_id(0), FEW, TOKENS, ROWS)
    if row >= rows:
        return
    head = tl.program_id(1)
    at = tl.arange(0, TOKENS)
    there = chunk * TOKENS + at < count
    tokens = first + chunk * TOKENS + at
    dtype: tl.constexpr = written.dtype.element_ty
    keys, columns = tl.arange(0, KEYS)[None, :], tl.arange(0, VALUES)[None, :]
    source = qkv + tokens[:, None] * qkv_stride
    key_head, whole = head // (HV // HK), there[:, None] & (keys < DK)
    k = tl.load(source + (HK + key_head) * DK + keys, mask=whole, other=0.0)
    unit_k = unit_factor(k, eps, 1)
    q = tl.load(source + key_head * DK + keys, mask=whole, other=0.0)
    unit_q = unit_factor(q, eps, 1) * (DK**-0.5)
    own_units = units + tokens * (2 * HK) + key_head
    # One of the value heads that share a key head writes.
    writes = at < tl.where(head % (HV // HK) == 0, count - chunk * TOKENS, 0)
    tl.store(own_units, unit_q, mask=writes)
    tl.store(own_units + HK, unit_k, mask=writes)
    gates = ba + tokens * ba_stride
    strength = write_strength(gates, head, there)
    total = tl.cumsum(log_decay(gates, head, there, a_log, bias, HV), 0)
    # exp must not overflow where the sum is that of a later token.
    causal = at[:, None] >= at[None, :]
    left = tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)) * unit_k[None, :]
    place = tokens[:, None] * HV + head
    similar = tl.dot(q, tl.trans(k), input_precision=PRECISION) * left * unit_q[:, None]
    attended = tl.where(causal, similar, 0.0).to(dtype)
    tl.store(attention + place * TOKENS + at[None, :], attended, mask=there[:, None])
    similar = tl.dot(k, tl.trans(k), input_precision=PRECISION) * left
    system = tl.where(at[:, None] > at[None, :], similar * (unit_k * strength)[:, None], 0.0)
    solution = _inverse(system, TOKENS)
    inside = there[:, None] & (columns < DV)
    own_value = source + 2 * HK * DK + head * DV + columns
    v = tl.load(own_value, mask=inside, other=0.0)
    new = tl.dot((solution * strength[None, :]).to(dtype), v, input_precision=PRECISION)
    tl.store(written + place * DV + columns, new.to(dtype), mask=inside)
    factor = strength * tl.exp(total) * unit_k
    seen = tl.dot((solution * factor[None, :]).to(dtype), k, input_precision=PRECISION)
    tl.store(read + place * DK + keys, seen.to(dtype), mask=whole)
    tl.store(decay + tokens * HV + head, total, mask=there)
    if SAVES > 0:
        # The state row of the chunk's first save, or -1.
        begun, end = chunk * TOKENS, tl.load(save_starts + row + 1)
        save, every = tl.load(save_starts + row), tl.arange(0, SAVES)
        own = (every >= save) & (every < end)
        offsets = tl.load(save_offsets + every, mask=own, other=0)
        save += tl.sum((own & (offsets <= begun)).to(tl.int32), 0)
        is_here = offset_of(save_offsets, save, end) <= begun + TOKENS
        target = tl.load(save_rows + save, mask=is_here, other=-1)
        tl.store(save_at + first + begun, target, mask=head == 0)


@triton.jit
def _after(memory, k, unit_k, new, total, last, at, PRECISION: tl.constexpr):
    """Return the state after the token `last` of a chunk, from the state before the chunk.

    k, new: keys, and the values that the tokens write. total: sums of the logarithms of the decay.
    """
    end, upto = tl.sum(tl.where(at == last, total, 0.0), 0), at <= last
    factor = tl.where(upto, tl.exp(tl.where(upto, end - total, 0.0)) * unit_k, 0.0)
    parts = (new.to(tl.float32) * factor[:, None]).to(k.dtype)
    return memory * tl.exp(end) + tl.dot(tl.trans(k), parts, input_precision=PRECISION)


@triton.jit
def _chunk_scan(
    qkv,
    written,
    read,
    attention,
    decay,
    units,
    save_at,
    state,
    query_starts,
    state_in,
    state_out,
    out,
    qkv_stride,
    rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    SAVES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # One tile of all its tokens for each long row.
    row, _, first, count = find_tile(query_starts, rows, tl.program_id(0), FEW, 2**30, ROWS)
    if row >= rows:
        return
    head = tl.program_id(1)
    keys, columns = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    cells = head * (DK * DV) + keys[:, None] * DV + columns[None, :]
    inside = (keys[:, None] < DK) & (columns[None, :] < DV)
    begin = tl.load(state_in + row).to(tl.int64)
    known = (keys[:, None] < tl.where(begin >= 0, DK, 0)) & (columns[None, :] < DV)
    memory = tl.load(state + begin * (HV * DK * DV) + cells, mask=known, other=0.0)
    key_head = head // (HV // HK)
    at = tl.arange(0, TOKENS)
    dtype: tl.constexpr = out.dtype.element_ty
    for begun in range(0, count, TOKENS):
        there = begun + at < count
        tokens = first + begun + at
        source = qkv + tokens[:, None] * qkv_stride + key_head * DK + keys[None, :]
        whole = there[:, None] & (keys[None, :] < DK)
        q = tl.load(source, mask=whole, other=0.0)
        k = tl.load(source + HK * DK, mask=whole, other=0.0)
        unit_q = tl.load(units + tokens * (2 * HK) + key_head, mask=there, other=0.0)
        unit_k = tl.load(units + tokens * (2 * HK) + HK + key_head, mask=there, other=0.0)
        place = tokens[:, None] * HV + head
        seen = tl.load(read + place * DK + keys[None, :], mask=whole, other=0.0)
        part = there[:, None] & (columns[None, :] < DV)
        new = tl.load(written + place * DV + columns[None, :], mask=part, other=0.0).to(tl.float32)
        total = tl.load(decay + tokens * HV + head, mask=there, other=0.0)
        narrow = memory.to(dtype)
        new = (new - tl.dot(seen, narrow, input_precision=PRECISION)).to(dtype)
        if SAVES > 0:
            target = tl.load(save_at + first + begun).to(tl.int64)
            saving = (keys[:, None] < tl.where(target >= 0, DK, 0)) & (columns[None, :] < DV)
            tl.store(state + target * (HV * DK * DV) + cells, memory, mask=saving)
            tl.store(written + place * DV + columns[None, :], new, mask=part)
        attended = tl.dot(q, narrow, input_precision=PRECISION)
        attended *= (unit_q * tl.exp(total))[:, None]
        own = tl.load(attention + place * TOKENS + at[None, :], mask=there[:, None], other=0.0)
        attended += tl.dot(own, new, input_precision=PRECISION)
        tl.store(out + place * DV + columns[None, :], attended.to(dtype), mask=part)
        last = tl.minimum(count - begun, TOKENS) - 1
        memory = _after(memory, k, unit_k, new, total, last, at, PRECISION)
    end = tl.load(state_out + row).to(tl.int64)
    if end >= 0:
        tl.store(state + end * (HV * DK * DV) + cells, memory, mask=inside)


@triton.jit
def _chunk_saves(
    qkv,
    written,
    decay,
    units,
    state,
    query_starts,
    save_starts,
    save_offsets,
    save_rows,
    qkv_stride,
    rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    save, head, every = tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    ends = tl.load(save_starts + every + 1, mask=every < rows, other=2**30)
    row = tl.sum((ends <= save).to(tl.int32), 0)
    if row >= rows:
        return
    first = tl.load(query_starts + row).to(tl.int64)
    if tl.load(query_starts + row + 1) - first <= FEW:
        return
    offset, end = tl.load(save_offsets + save), tl.load(save_starts + row + 1)
    begun = (offset - 1) // TOKENS * TOKENS
    # The program of a chunk's first save computes all of the chunk.
    has_earlier = save > tl.load(save_starts + row)
    if tl.load(save_offsets + save - 1, mask=has_earlier, other=0) > begun:
        return
    keys, columns = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    cells = head * (DK * DV) + keys[:, None] * DV + columns[None, :]
    inside = (keys[:, None] < DK) & (columns[None, :] < DV)
    target = tl.load(save_rows + save).to(tl.int64) * (HV * DK * DV)
    memory = tl.load(state + target + cells, mask=inside, other=0.0)
    at = tl.arange(0, TOKENS)
    tokens, there = first + begun + at, begun + at < tl.load(query_starts + row + 1) - first
    key_head = HK + head // (HV // HK)
    source = qkv + tokens[:, None] * qkv_stride + key_head * DK + keys[None, :]
    k = tl.load(source, mask=there[:, None] & (keys[None, :] < DK), other=0.0)
    unit_k = tl.load(units + tokens * (2 * HK) + key_head, mask=there, other=0.0)
    values = written + (tokens[:, None] * HV + head) * DV + columns[None, :]
    new = tl.load(values, mask=there[:, None] & (columns[None, :] < DV), other=0.0)
    total = tl.load(decay + tokens * HV + head, mask=there, other=0.0)
    while offset <= begun + TOKENS:
        saved = _after(memory, k, unit_k, new, total, offset - begun - 1, at, PRECISION)
        target = tl.load(save_rows + save).to(tl.int64) * (HV * DK * DV)
        tl.store(state + target + cells, saved, mask=inside)
        save += 1
        offset = offset_of(save_offsets, save, end)


def compute_chunks(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    bias: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
    out: Tensor,
) -> None:
    """Write the outputs [T, Hv * Dv] of the rows with more than FEW_TOKENS, and their states.

    Rows of qkv and ba are contiguous.
    """
    _, heads, key_dim, value_dim = state.shape
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    keys, values = (max(16, next_power_of_2(dim)) for dim in (key_dim, value_dim))
    tokens, num_rows = len(qkv), len(rows.state_in)
    written = qkv.new_empty(tokens, heads, value_dim)
    read = qkv.new_empty(tokens, heads, key_dim)
    attention = qkv.new_empty(tokens, heads, CHUNK)
    decay = qkv.new_empty(tokens, heads, dtype=float32)
    units = qkv.new_empty(tokens, 2 * key_heads, dtype=float32)
    save_at = rows.save_rows.new_empty(tokens)
    sizes = {"HK": key_heads, "HV": heads, "DK": key_dim, "DV": value_dim, "KEYS": keys}
    common: dict[str, Any] = {
        "TOKENS": CHUNK,
        "FEW": FEW_TOKENS,
        "ROWS": next_power_of_2(num_rows),
        "PRECISION": "tf32x3" if qkv.dtype == float32 else "tf32",
        **pdl(qkv),
    }
    num_saves = len(rows.save_rows)
    saves = next_power_of_2(num_saves) if num_saves else 0
    _chunk_systems[(rows.max_chunks, heads)](
        qkv,
        ba,
        a_log,
        bias,
        rows.query_starts,
        rows.save_starts,
        rows.save_offsets,
        rows.save_rows,
        written,
        read,
        attention,
        decay,
        units,
        save_at,
        qkv.stride(0),
        ba.stride(0),
        num_rows,
        eps,
        **sizes,
        VALUES=values,
        SAVES=saves,
        num_warps=_WARPS,
        **common,
    )
    columns = min(_COLUMNS, values)
    parts = cdiv(value_dim, columns)
    _chunk_scan[(rows.max_long_rows, heads, parts)](
        qkv,
        written,
        read,
        attention,
        decay,
        units,
        save_at,
        state,
        rows.query_starts,
        rows.state_in,
        rows.state_out,
        out,
        qkv.stride(0),
        num_rows,
        **sizes,
        COLUMNS=columns,
        SAVES=saves,
        num_warps=_WARPS,
        num_stages=1 if qkv.dtype == float32 else 2,
        **common,
    )
    if num_saves:
        _chunk_saves[(num_saves, heads, parts)](
            qkv,
            written,
            decay,
            units,
            state,
            rows.query_starts,
            rows.save_starts,
            rows.save_offsets,
            rows.save_rows,
            qkv.stride(0),
            num_rows,
            **sizes,
            COLUMNS=columns,
            num_warps=_WARPS,
            **common,
        )
