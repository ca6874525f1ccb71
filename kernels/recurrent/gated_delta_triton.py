"""The gated delta rule in Triton. The reference is in kernels/ops/gated_delta.py."""

from __future__ import annotations

from torch import Tensor

from sidestep.kernels.recurrent.chunks_triton import compute_chunks
from sidestep.kernels.recurrent.few_tokens_triton import compute_few_tokens
from sidestep.kernels.recurrent.state_rows import StateRows


def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    bias: Tensor,
    state: Tensor,
    rows: StateRows,
    eps: float,
) -> Tensor:
    """Return the outputs [T, Hv * Dv] of all rows; see the reference.

    A row's number of tokens chooses its kernel. Each kernel leaves the rows of the other alone.
    """
    _, heads, _, value_dim = state.shape
    out = qkv.new_empty(len(qkv), heads * value_dim)
    compute_few_tokens(qkv, ba, a_log, bias, state, rows, eps, out)
    if rows.max_long_rows:
        compute_chunks(qkv, ba, a_log, bias, state, rows, eps, out)
    return out
