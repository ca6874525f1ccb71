"""Causal convolution of each channel over a few tokens, with SiLU, as recurrent layers begin."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.ops.silu_mul import each_row
from sidestep.kernels.recurrent.state_rows import StateRow, StateRows, rows_on_host


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows) -> Tensor:
    """Return SiLU of the convolution of each token with those before it, [T, C].

    x [T, C], whose rows may lie apart; weight [C, K], the newest token's factor last. state
    [N, C, K - 1], in x's type: the inputs before a row's first token, the newest last. It is
    updated as `rows` says. Sums are float32 and rounded to x's type before and after the
    activation.
    """
    out = x.new_zeros(x.shape)
    factors = weight.float().T.contiguous()
    for row in rows_on_host(rows):
        out[row.tokens] = _convolved(_with_state(x, state, row), factors).to(x.dtype)
    return each_row(torch.ops.aten.silu.out, out.float()).to(x.dtype)


def _with_state(x: Tensor, state: Tensor, row: StateRow) -> Tensor:
    """Return the inputs of a row behind those of its state, [K - 1 + n, C], and write the states.

    They are a copy, so that the state may be written over.
    """
    kept = state.shape[2]
    before = x.new_zeros(kept, x.shape[1]) if row.state_in < 0 else state[row.state_in].T
    inputs = torch.cat([before, x[row.tokens]])
    for offset, target in row.saves:
        state[target] = inputs[offset : offset + kept].T
    return inputs


def _convolved(inputs: Tensor, factors: Tensor) -> Tensor:
    """Return the sums [n, C] of inputs [K - 1 + n, C] times factors [K, C], float32."""
    wide, count = inputs.float(), len(inputs) - len(factors) + 1
    total = wide[:count] * factors[0]
    for tap in range(1, len(factors)):
        total += wide[tap : tap + count] * factors[tap]
    return total
