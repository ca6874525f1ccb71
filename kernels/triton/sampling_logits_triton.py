"""Device functions for the rows of logits that the sampling kernels read."""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(2**31 - 1)
"""Token id above all others: no token."""
INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)
"""Largest finite float32."""


@triton.jit
def load_logits(values, offsets, inside):
    """Return values as float32, with minus infinity for NaN and for elements outside."""
    x = tl.load(values + offsets, mask=inside, other=-INFINITY).to(tl.float32)
    return tl.maximum(x, -INFINITY)


@triton.jit
def finite(x):
    """Return x with the largest finite values in place of infinities."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def weight_of(x, best, scale):
    """Return exp((x - best) / T), at most 1; `scale` is log2(e) / T and best is finite."""
    return tl.exp2(tl.minimum((x - best) * scale, 0.0))


@triton.jit
def to_key(value, LOW_BITS: tl.constexpr):
    """Return an int64 in the order of the floats, without low bits that the logits' type lacks."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS).to(tl.int64)


@triton.jit
def from_key(key, LOW_BITS: tl.constexpr):
    """Return the float32 of a key."""
    bits = (key << LOW_BITS).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << LOW_BITS) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def parameters_of(slot, parameters, WORDS: tl.constexpr, PLACES: tl.constexpr):
    """Return the temperature of a slot's draw and of its filters, top_k, top_p, min_p and the seed.

    PLACES: the indices of SamplingWords, in its order.
    """
    own = parameters + slot.to(tl.int64) * WORDS
    t = tl.load(own + PLACES[0]).to(tl.float32, bitcast=True)
    low = tl.load(own + PLACES[5]).to(tl.int64) & 0xFFFFFFFF
    return (
        t,
        tl.where(tl.load(own + PLACES[4]) != 0, 1.0, t),
        tl.load(own + PLACES[1]),
        tl.load(own + PLACES[2]).to(tl.float32, bitcast=True),
        tl.load(own + PLACES[3]).to(tl.float32, bitcast=True),
        (tl.load(own + PLACES[5] + 1).to(tl.int64) << 32) | low,
    )


@triton.jit
def is_filtered(t, k, p, min_p, vocab):
    """Return whether a row draws from less than all tokens."""
    return (t > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (min_p > 0))
