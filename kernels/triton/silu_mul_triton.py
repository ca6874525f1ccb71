"""Gated activation in Triton. The reference is in kernels/ops/silu_mul.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl


@triton.jit
def _silu_mul(gate_up, out, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two steps, as in the models' training.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, F], for contiguous gate_up [T, 2 F]."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    block = min(1024, triton.next_power_of_2(width // 2))
    _silu_mul[(rows, triton.cdiv(width // 2, block))](
        gate_up, out, width // 2, block, num_warps=4, **pdl(out)
    )
    return out
