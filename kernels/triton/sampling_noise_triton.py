"""Noise of the sampling kernels: a hash of seed, position and token, as an exponential variate.

The bits are those of kernels/ops/sampling.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Return the SplitMix64 finaliser of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_keys(seed, position):
    """Return a row's two uint32 keys, from its int64 seed and int32 position."""
    keys = _mix(
        _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    )
    return keys.to(tl.uint32), (keys >> 32).to(tl.uint32)


@triton.jit
def noise_bits(first_key, second_key, ids):
    """Return uint32 bits, the same as kernels.ops.sampling.noise_bits."""
    x = ids.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ second_key) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def uniform(first_key, second_key, ids):
    """Return a variate between 0 and 1 for each token."""
    bits = noise_bits(first_key, second_key, ids)
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential_of(u):
    """Return -log(1 - u), a standard exponential variate, of a uniform one.

    Its relative error is 2e-7. The library's logarithm of 1 + x has no form in Triton, and the
    noise that wins comes from small u, where 1 - u has no precision left. So 1 - u is written as
    2^e (1 + m) with m in [-1/4, 1/2], where m, like u, is exact if u is small (e = 0). Then log(1 +
    m) = m + m^2 q(m) with the minimax polynomial q. If u rounds to 1 the result is 88, not
    infinity.
    """
    rest = 1.0 - u
    exponent = (rest.to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    scale = (0x3F800000 - exponent).to(tl.float32, bitcast=True)
    m = tl.fma(-u, scale, scale - 1.0)
    q = tl.fma(m, 0.05413246899843216, -0.12067367136478424)
    q = tl.fma(q, m, 0.14983916282653809)
    q = tl.fma(q, m, -0.1682281196117401)
    q = tl.fma(q, m, 0.19977077841758728)
    q = tl.fma(q, m, -0.24993441998958588)
    q = tl.fma(q, m, 0.3333354890346527)
    q = tl.fma(q, m, -0.5000005960464478)
    return -tl.fma((exponent >> 23).to(tl.float32), 0.6931471805599453, tl.fma(q, m * m, m))


@triton.jit
def exponential(first_key, second_key, ids):
    """Return a standard exponential variate for each token."""
    return exponential_of(uniform(first_key, second_key, ids))
