"""Scores of attention in units of ln 2, as kernels have them that compute powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""The number of units in 1."""


@triton.jit
def bounded(scores, CAP: tl.constexpr):
    """Return CAP * tanh(score / CAP) of scores, for a CAP that is not in these units."""
    # tanh(y) is 1 - 2 / (1 + exp(2 y)), also where the power is 0 or infinite.
    power = tl.exp2(scores * (2.0 / CAP))
    return (CAP * LOG2_E) * (1.0 - 2.0 / (1.0 + power))
