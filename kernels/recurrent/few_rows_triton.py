"""The gated delta net of rows of few tokens in Triton, between its two projections.

A program has the state of one value head of a row. It convolves the head's query, key and value,
goes through the row's tokens one after the other, and norms and gates the results. It writes the
states after the last token that is no draft, after each draft, and after each token that asks for a
save. The state is loaded while the kernel before still runs.

The value heads that share a key head also share the convolution's states of its query and key. Each
of their programs reads them, and the last one that has done so writes them.

The references are in kernels/ops: causal_conv.py, gated_delta.py and rms_norm.py.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import next_power_of_2, pdl
from sidestep.kernels.launch_order import reads_early
from sidestep.kernels.recurrent.causal_conv_triton import inputs_at
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.delta_tokens_triton import (
    log_decay,
    offset_of,
    unit_factor,
    write_strength,
)
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows

_MOST_COUNTERS = 1 << 18
"""Most rows times key heads."""


@triton.jit
def _earlier(
    x,
    x_stride,
    weight,
    old,
    known,
    first,
    place,
    channels,
    index,
    N: tl.constexpr,
    K: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Return the convolution's sum of a token at `place` of its row without the token itself.

    channels: those at `index`, of which N count. FRESH: whether all its inputs are in the row's
    state, since it is the first token.
    """
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(K - 1):
        factor = tl.load(weight + channels * K + tap, mask=index < N, other=0.0).to(tl.float32)
        back = place + (tap - K + 1)
        # Scalars bound the index, since masks are of one shape.
        before = old + channels * (K - 1) + (K - 1 + back)
        if FRESH:
            value = tl.load(before, mask=index < tl.where(known, N, 0), other=0.0).to(tl.float32)
        else:
            kept = tl.where(known & (back < 0), N, 0)
            value = tl.load(before, mask=index < kept, other=0.0).to(tl.float32)
            own = x + (first + back) * x_stride + channels
            there = index < tl.where(back < 0, 0, N)
            value += tl.load(own, mask=there, other=0.0).to(tl.float32)
        total += factor * value
    return total


@triton.jit
def _activated(earlier, factor, value, dtype: tl.constexpr):
    """Return the SiLU of the convolution, rounded as in causal_conv_triton.py."""
    total = (earlier + factor * value.to(tl.float32)).to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)


@triton.jit
def _write_saves(
    x,
    x_stride,
    first,
    channels,
    inside,
    conv,
    conv_stride,
    old,
    known,
    save,
    last_save,
    save_offsets,
    save_rows,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    C: tl.constexpr,
):
    """Write the convolution's states, of these channels [1, N], that the row's tokens ask for."""
    kept = tl.arange(0, KEPT)[:, None]
    for one in range(save, last_save):
        place = tl.load(save_offsets + one) - (K - 1) + kept
        there = inside & (kept < K - 1)
        value = inputs_at(x, x_stride, first, place, channels, old, known, there, C, K)
        target = conv + tl.load(save_rows + one).to(tl.int64) * conv_stride
        tl.store(target + channels * (K - 1) + kept, value.to(conv.dtype.element_ty), mask=there)


@reads_early(
    "query_starts", "state_in", "state_out", "settled", "save_starts", "save_offsets", "save_rows"
)
@triton.jit
def _few_rows(
    x,
    gate,
    ba,
    weight,
    a_log,
    bias,
    norm,
    conv,
    state,
    query_starts,
    state_in,
    state_out,
    settled,
    save_starts,
    save_offsets,
    save_rows,
    counters,
    out,
    x_stride,
    gate_stride,
    ba_stride,
    conv_stride,
    eps,
    norm_eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    ENDS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    # The tables that @reads_early names need no wait (see kernels/launch.py). Nor do states: the
    # last kernels that wrote them are those of earlier steps, and of copies before this one.
    first = tl.load(query_starts + row).to(tl.int64)
    count = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    if (count == 0) | (count > MOST):
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        return
    # Programs that share states of the convolution, where it has any.
    GROUP: tl.constexpr = HV // HK if K > 1 else 1
    C: tl.constexpr = 2 * HK * DK + HV * DV
    dtype: tl.constexpr = out.dtype.element_ty
    keys, columns = tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    key_head = head // (HV // HK)
    begin = tl.load(state_in + row).to(tl.int64)
    known = begin >= 0
    cells = head * (DK * DV) + keys[:, None] * DV + columns[None, :]
    inside = (keys[:, None] < DK) & (columns[None, :] < DV)
    kept = (keys[:, None] < tl.where(known, DK, 0)) & (columns[None, :] < DV)
    memory = tl.load(state + begin * (HV * DK * DV) + cells, mask=kept, other=0.0)
    # Queries and keys in one vector, of as many numbers as there are threads. Each is computed
    # once; of shorter vectors each thread would compute a part of a tile's row or column.
    pair = tl.arange(0, 2 * KEYS)
    which, key = pair // KEYS, pair % KEYS
    qk_at = (which * HK + key_head) * DK + key
    v_at = 2 * HK * DK + head * DV + columns
    of_keys, of_values = key < DK, columns < DV
    old = conv + begin * conv_stride
    qk_sum = _earlier(x, x_stride, weight, old, known, first, 0, qk_at, key, DK, K, True)
    v_sum = _earlier(x, x_stride, weight, old, known, first, 0, v_at, columns, DV, K, True)
    qk_factor = tl.load(weight + qk_at * K + (K - 1), mask=of_keys, other=0.0).to(tl.float32)
    v_factor = tl.load(weight + v_at * K + (K - 1), mask=of_values, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm + columns, mask=of_values, other=0.0).to(tl.float32)
    end, sure = tl.load(state_out + row).to(tl.int64), tl.load(settled + row)
    first_save, last_save = tl.load(save_starts + row), tl.load(save_starts + row + 1)
    first_end = tl.where(end >= 0, sure, MOST + 1)
    counter = counters + row * HK + key_head
    arrived = tl.full([], GROUP - 1, tl.int32)
    if (GROUP > 1) & (count == 1):
        # All that a first token needs of the old states has been read.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The convolution's states after the settled tokens and after each draft, one below the other.
    KEPT: tl.constexpr = triton.next_power_of_2(K)
    every = tl.arange(0, ENDS * KEPT)[:, None]
    drafts, within = every // KEPT, every % KEPT
    places = sure + drafts - (K - 1) + within
    ends = (within < K - 1) & (sure + drafts <= tl.where(end >= 0, count, -1))
    written = conv + (end + drafts) * conv_stride + within
    channels = tl.where(known, C, 0)
    of_v, of_qk = ends & of_values[None, :], ends & of_keys[None, :]
    if ENDS == 1:
        # They are loaded here, where nothing waits for them. With several drafts they would take
        # too many registers meanwhile.
        all_keys = tl.where((count > 1) | (arrived == GROUP - 1), DK, 0)
        read = ends & (key < all_keys)[None, :]
        v_ends = inputs_at(x, x_stride, first, places, v_at[None, :], old, channels, of_v, C, K)
        qk_ends = inputs_at(x, x_stride, first, places, qk_at[None, :], old, channels, read, C, K)
    save = first_save
    next_save = offset_of(save_offsets, save, last_save)
    for i in range(count):
        own = x + (first + i) * x_stride
        qk = _activated(qk_sum, qk_factor, tl.load(own + qk_at, mask=of_keys, other=0.0), dtype)
        v = _activated(v_sum, v_factor, tl.load(own + v_at, mask=of_values, other=0.0), dtype)
        g = tl.load(
            gate + (first + i) * gate_stride + head * DV + columns, mask=of_values, other=0.0
        ).to(tl.float32)
        gates = ba + (first + i) * ba_stride
        strength = write_strength(gates, head, True)
        decay = tl.exp(log_decay(gates, head, True, a_log, bias, HV))
        both = tl.reshape(qk, [2, KEYS])
        is_query = tl.arange(0, 2)[:, None] == 0
        both *= unit_factor(both, eps, 1)[:, None] * tl.where(is_query, DK**-0.5, 1.0)
        q = tl.sum(tl.where(is_query, both, 0.0), 0)
        k = tl.sum(tl.where(is_query, 0.0, both), 0)
        memory *= decay
        change = (v - tl.sum(memory * k[:, None], 0)) * strength
        memory += k[:, None] * change[None, :]
        attended = tl.sum(memory * q[:, None], 0).to(dtype).to(tl.float32)
        scale = tl.rsqrt(tl.sum(attended * attended, 0) / DV + norm_eps)
        normed = ((attended * scale).to(dtype).to(tl.float32) * norm_weight).to(dtype)
        result = normed.to(tl.float32) * (g / (1.0 + tl.exp(-g)))
        target = out + (first + i) * (HV * DV) + head * DV + columns
        tl.store(target, result.to(dtype), mask=of_values)
        while next_save == i + 1:
            saved = tl.load(save_rows + save).to(tl.int64) * (HV * DK * DV)
            tl.store(state + saved + cells, memory, mask=inside)
            save += 1
            next_save = offset_of(save_offsets, save, last_save)
        if i + 1 >= first_end:
            saved = (end + (i + 1 - sure)) * (HV * DK * DV)
            tl.store(state + saved + cells, memory, mask=inside)
        if i + 1 < count:
            at = i + 1
            qk_sum = _earlier(x, x_stride, weight, old, known, first, at, qk_at, key, DK, K, False)
            v_sum = _earlier(
                x, x_stride, weight, old, known, first, at, v_at, columns, DV, K, False
            )
    if ENDS > 1:
        v_ends = inputs_at(x, x_stride, first, places, v_at[None, :], old, channels, of_v, C, K)
        qk_ends = inputs_at(x, x_stride, first, places, qk_at[None, :], old, channels, of_qk, C, K)
    if (GROUP > 1) & (count > 1):
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if K > 1:
        _write_saves(
            x, x_stride, first, v_at[None, :], of_values[None, :], conv, conv_stride, old,
            channels, first_save, last_save, save_offsets, save_rows, K, KEPT, C,
        )  # fmt: skip
        is_last = arrived == GROUP - 1
        if is_last:
            if GROUP > 1:
                tl.store(counter, 0)
            _write_saves(
                x, x_stride, first, qk_at[None, :], of_keys[None, :], conv, conv_stride, old,
                channels, first_save, last_save, save_offsets, save_rows, K, KEPT, C,
            )  # fmt: skip
        # All threads have read the old states before one writes over them.
        tl.debug_barrier()
        tl.store(written + v_at[None, :] * (K - 1), v_ends.to(dtype), mask=of_v)
        own_ends = ends & (key < tl.where(is_last, DK, 0))[None, :]
        tl.store(written + qk_at[None, :] * (K - 1), qk_ends.to(dtype), mask=own_ends)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return memory for the programs that have arrived, which is zero between kernels."""
    return torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)


def compute_few_rows(
    projected: Projected,
    weights: DeltaWeights,
    conv: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
    out: Tensor,
) -> None:
    """Write the results [T, Hv * Dv] of the rows with up to FEW_TOKENS, and their states.

    conv [N, C, K - 1]; state float32 [N, Hv, Dk, Dv]. Rows of `out` are contiguous.
    """
    _, heads, key_dim, value_dim = state.shape
    qkv, count = projected.qkv, len(rows.state_in)
    key_heads = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    assert count * key_heads <= _MOST_COUNTERS
    keys, columns = next_power_of_2(key_dim), next_power_of_2(value_dim)
    _few_rows[(count, heads)](
        *projected,
        weights.conv,
        weights.a_log,
        weights.bias,
        weights.norm,
        conv,
        state,
        rows.query_starts,
        rows.state_in,
        rows.state_out,
        rows.settled,
        rows.save_starts,
        rows.save_offsets,
        rows.save_rows,
        _counters(qkv.device),
        out,
        *(part.stride(0) for part in projected),
        conv.stride(0),
        eps,
        weights.norm_eps,
        key_heads,
        heads,
        key_dim,
        value_dim,
        keys,
        columns,
        weights.conv.shape[1],
        next_power_of_2(1 + rows.max_drafts),
        FEW_TOKENS,
        num_warps=max(1, min(16, keys * columns // 2048)),
        **pdl(qkv),
    )
