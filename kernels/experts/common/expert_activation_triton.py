"""Activations of experts in Triton, for the products that end in one."""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.triton.silu_mul_triton import gated_silu


@triton.jit
def gated(gate, up, dtype, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return act(gate) * up in float32, or clamped_swiglu where there is a LIMIT."""
    if LIMIT is not None:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT)
        up = tl.clamp(up.to(dtype).to(tl.float32), -LIMIT, LIMIT)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    elif GELU:
        gate = gate.to(dtype).to(tl.float32)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 1 + tanh(y) is 2 / (1 + exp(-2 y)).
        activated = (gate / (1.0 + tl.exp(-2.0 * inner))).to(dtype).to(tl.float32)
        return activated * up.to(dtype).to(tl.float32)
    else:
        return gated_silu(gate, up, dtype)
