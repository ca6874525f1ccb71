"""Gated activation in Triton. The reference is in kernels/ops/silu_mul.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl


@triton.jit
def gated_silu(gate, up, dtype):
    """Return silu(gate) * up in float32, rounded to dtype before and after the activation.

    These are the roundings of separate kernels for the product, the activation and the gating, as
    in the models' training. The caller rounds the result. Triton and Gluon kernels call it.
    """
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul(gate_up, out, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * F + columns, gated_silu(gate, up, dtype).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, F], for contiguous gate_up [T, 2 F]."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    block = min(1024, next_power_of_2(width // 2))
    _silu_mul[(rows, cdiv(width // 2, block))](
        gate_up, out, width // 2, block, num_warps=4, **pdl(out)
    )
    return out
