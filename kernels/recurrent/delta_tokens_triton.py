"""Gates, factors of keys and saves of the gated delta rule, which its kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def unit_factor(x, eps, AXIS: tl.constexpr):
    """Return the factors that give x length one along its last dimension, which is AXIS."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, AXIS) + eps)


@triton.jit
def write_strength(ba, head, inside):
    """Return the part of the way to the new value that tokens write. ba: their gates' places."""
    logit = tl.load(ba + head, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, 1.0 / (1.0 + tl.exp(-logit)), 0.0)


@triton.jit
def log_decay(ba, head, inside, a_log, bias, HV: tl.constexpr):
    """Return the logarithms of the decays of tokens; 0 outside."""
    x = tl.load(ba + HV + head, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.where(inside, -tl.exp(tl.load(a_log + head)) * softplus, 0.0)


@triton.jit
def offset_of(save_offsets, save, end):
    """Return after how many tokens of its row a save is made; more than all if there is none."""
    return tl.load(save_offsets + save, mask=save < end, other=_NEVER)
