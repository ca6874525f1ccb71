"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up [T, 2 F] with the gate first. Returns [T, F]."""
    if on_gpu(gate_up):
        from sidestep.kernels.silu_mul_triton import silu_mul as launch

        return launch(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)
