"""The gated activation of gpt-oss's experts."""

from __future__ import annotations

from torch import Tensor

from sidestep.kernels.native import rows as native
from sidestep.kernels.ops.silu_mul import row_sigmoid


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), [T, F], on a CPU.

    gate_up: [T, 2 F] with the gate first. The gate is cut to at most `limit`, up to between -limit
    and limit. The bits of a row depend on that row alone.
    """
    if (made := native.clamped_swiglu(gate_up, alpha, limit)) is not None:
        return made
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return row_sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))
