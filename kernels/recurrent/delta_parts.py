"""The inputs of the kernels of a gated delta net, between its two projections."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaWeights(NamedTuple):
    """The weights between the projections."""

    conv: Tensor
    """[C, K]: see kernels/ops/causal_conv.py."""
    a_log: Tensor
    """float32 [Hv]: see kernels/ops/gated_delta.py."""
    bias: Tensor
    """float32 [Hv]"""
    norm: Tensor
    """[Dv]: of the norm of each head's result."""
    norm_eps: float


class Projected(NamedTuple):
    """The parts of the first projection, whose rows may lie apart."""

    qkv: Tensor
    """[T, C]: queries and keys of the key heads, then values."""
    gate: Tensor
    """[T, Hv * Dv]"""
    ba: Tensor
    """[T, 2 Hv]: see kernels/ops/gated_delta.py."""
