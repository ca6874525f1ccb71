"""Gated activation of the MLP with GELU (GeGLU, Shazeer 2020), in its approximation by tanh."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native import rows as native
from sidestep.kernels.ops.silu_mul import by_rows


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, [T, F], for gate_up [T, 2 F] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    if on_gpu(gate_up):
        return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
    if (made := native.gelu_mul(gate_up)) is not None:
        return made
    return by_rows(partial(torch.ops.aten.gelu.out, approximate="tanh"), gate).mul_(up)
