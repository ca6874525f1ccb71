"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu

_SERIAL = 1 << 15
"""Numbers up to which torch uses a single thread, and which it gives to each thread at least."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up [T, 2 F] with the gate first. Returns [T, F]."""
    if on_gpu(gate_up):
        from sidestep.kernels.silu_mul_triton import silu_mul as launch

        return launch(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return _silu(gate).mul_(up)


def _silu(x: Tensor) -> Tensor:
    """silu of x [T, F] on a CPU, each row in one way however many there are.

    torch cuts a tensor into as many parts of one size as threads have work for, and computes the last numbers of a part
    by other instructions than the rest. So parts must end where rows end.
    """
    threads, rows, width = torch.get_num_threads(), x.shape[0], x.shape[1]
    if threads == 1 or rows == 1 or x.numel() <= _SERIAL:
        return torch.nn.functional.silu(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Rows of which each thread gets as many, and enough to be worth one; then pieces that a single thread computes.
    shared = rows - rows % (threads * -(-_SERIAL // width))
    few = max(1, _SERIAL // width)
    cuts = [*([0] if shared else []), *range(shared, rows, few), rows]
    for first, last in zip(cuts, cuts[1:], strict=False):
        torch.ops.aten.silu.out(x[first:last], out=out[first:last])
    return out
