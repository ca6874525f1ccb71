"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual addition before it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] of any float type; weight [D]. Computed in float32 and rounded to x's type before the weight is applied,
    as the models were trained.
    """
    wide = x.float()
    rows = wide.reshape(-1, 1, wide.shape[-1])
    # eps + x.x / D by one small matrix product: the fewest operations, which is what counts for a few rows.
    variance = torch.baddbmm(_epsilon(eps, x.device), rows, rows.transpose(1, 2), alpha=1 / wide.shape[-1])
    scale = variance.rsqrt_().view(*x.shape[:-1], 1)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is written over `residual`. Shapes as in rms_norm."""
    residual += x
    return rms_norm(residual, weight, eps), residual


@functools.cache
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), eps, device=device)
