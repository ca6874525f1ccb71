"""The causal convolution of rows of many tokens in Triton, with its states.

The reference is kernels/ops/causal_conv.py; rows of few tokens are in few_rows_triton.py.

A program computes some channels of some consecutive tokens of a row. The program of a row's first
tokens also reads the row's state and writes the states after it, so that a state may be replaced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.recurrent.row_tiles_triton import find_tile
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows

_TOKENS, _CHANNELS = 32, 64
"""Tokens and channels of a program."""


@triton.jit
def inputs_at(x, x_stride, first, place, channels, state, known, there, C, K: tl.constexpr):
    """Return the inputs at `place`, counted from a row's first token, in float32.

    Negative places are in the row's state, whose K - 1 inputs end before the first token. known: C
    if the row has a state, else 0.
    """
    inside = (channels < C) & there
    own = tl.load(x + (first + place) * x_stride + channels, mask=inside & (place >= 0), other=0.0)
    before = tl.load(
        state + channels * (K - 1) + (K - 1 + place),
        mask=(channels < known) & there & (place < 0),
        other=0.0,
    )
    return own.to(tl.float32) + before.to(tl.float32)


@triton.jit
def _causal_conv(
    x,
    weight,
    state,
    query_starts,
    state_in,
    state_out,
    save_starts,
    save_offsets,
    save_rows,
    out,
    x_stride,
    state_stride,
    rows,
    C,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tile, first, count = find_tile(query_starts, rows, tl.program_id(0), FEW, TOKENS, ROWS)
    if row >= rows:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    places = tile * TOKENS + tl.arange(0, TOKENS)[:, None]
    there = places < count
    begin = tl.load(state_in + row).to(tl.int64)
    old, known = state + begin * state_stride, tl.where(begin >= 0, C, 0)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(K):
        factor = tl.load(weight + channels * K + tap, mask=channels < C, other=0.0).to(tl.float32)
        back = places + (tap - K + 1)
        total += factor * inputs_at(x, x_stride, first, back, channels, old, known, there, C, K)
    dtype: tl.constexpr = out.dtype.element_ty
    total = total.to(dtype).to(tl.float32)
    silu = (total / (1.0 + tl.exp(-total))).to(dtype)
    tl.store(out + (first + places) * C + channels, silu, mask=there & (channels < C))
    if tile > 0 or K == 1:
        return
    KEPT: tl.constexpr = triton.next_power_of_2(K)
    kept = tl.arange(0, KEPT)[:, None]
    written = (kept < K - 1) & (channels < C)
    cells = channels * (K - 1) + kept
    for save in range(tl.load(save_starts + row), tl.load(save_starts + row + 1)):
        place = tl.load(save_offsets + save) - (K - 1) + kept
        value = inputs_at(x, x_stride, first, place, channels, old, known, kept < K - 1, C, K)
        saved = state + tl.load(save_rows + save).to(tl.int64) * state_stride
        tl.store(saved + cells, value.to(dtype), mask=written)
    end = tl.load(state_out + row).to(tl.int64)
    if end >= 0:
        # No token of a long row is a draft.
        last = count - (K - 1) + kept
        values = inputs_at(x, x_stride, first, last, channels, old, known, kept < K - 1, C, K)
        # All threads have read the old state before one writes over it.
        tl.debug_barrier()
        tl.store(state + end * state_stride + cells, values.to(dtype), mask=written)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    """Return SiLU of the convolution, [T, C], of rows with more than FEW_TOKENS.

    x [T, C] has contiguous rows; see the reference.
    """
    tokens, channels = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, kernel = len(rows.state_in), weight.shape[1]
    grid = (tokens // _TOKENS + num_rows, cdiv(channels, _CHANNELS))
    _causal_conv[grid](
        x,
        weight,
        state,
        rows.query_starts,
        rows.state_in,
        rows.state_out,
        rows.save_starts,
        rows.save_offsets,
        rows.save_rows,
        out,
        x.stride(0),
        state.stride(0),
        num_rows,
        channels,
        kernel,
        _TOKENS,
        _CHANNELS,
        next_power_of_2(num_rows),
        FEW_TOKENS,
        num_warps=4,
        **pdl(x),
    )
    return out
