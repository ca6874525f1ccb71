"""Rotary position embedding (Su et al. 2021), in the half-split form of Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x in place and return x.

    With halves (a, b) of a head, the result is (a cos - b sin, b cos + a sin).

    x [T, H, D]; cos [T, 1, D], both halves alike; sin [T, 1, D], its first half negated, so that
    one roll of x by half a head serves both. All have x's type.
    """
    turned = torch.roll(x, x.shape[-1] // 2, -1).mul_(sin)
    return x.mul_(cos).add_(turned)
