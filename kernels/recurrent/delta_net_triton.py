"""The gated delta net between its projections in Triton.

The reference is kernels/ops/gated_delta.py.
"""

from __future__ import annotations

from torch import Tensor

from sidestep.kernels.recurrent.causal_conv_triton import causal_conv
from sidestep.kernels.recurrent.chunks_triton import compute_chunks
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.few_rows_triton import compute_few_rows
from sidestep.kernels.recurrent.gated_norm_triton import gated_rms_norm
from sidestep.kernels.recurrent.state_rows import StateRows


def delta_net(
    projected: Projected,
    weights: DeltaWeights,
    conv: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
) -> Tensor:
    """Return the results [T, Hv * Dv] of all rows; see the reference.

    A row's number of tokens chooses its kernels. Each kernel leaves the rows of the others alone.
    eps: added to the square of the length of queries and keys.
    """
    _, heads, _, value_dim = state.shape
    out = projected.qkv.new_empty(len(projected.qkv), heads * value_dim)
    compute_few_rows(projected, weights, conv, state, rows, eps, out)
    if rows.max_long_rows:
        qkv = causal_conv(projected.qkv, weights.conv, conv, rows)
        mixed = out.new_empty(out.shape)
        compute_chunks(qkv, projected.ba, weights.a_log, weights.bias, state, rows, eps, mixed)
        gated_rms_norm(mixed, weights.norm, weights.norm_eps, projected.gate, rows, out)
    return out
