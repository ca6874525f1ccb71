"""The norms of heads and the rotary embedding, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.triton.support import DEVICE, guarded

EPS = 1e-6


def rotary_tables(dim: int, positions: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(positions).double(), 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    )
    # The margins are NaN: a position beyond the last one would show.
    return guarded(angles.cos().float().to(DEVICE)), guarded(angles.sin().float().to(DEVICE))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x turned by the rotary embedding. x [T, heads, D]; cos, sin [T, D / 2]."""
    (a, b), c, s = x.chunk(2, -1), cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)
