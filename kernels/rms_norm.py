"""RMSNorm (Zhang and Sennrich 2019), alone and with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] of any float type; weight [D]. Computed in float32 and rounded to x's type before the weight is applied, as
    the models were trained.
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is written over `residual`. Shapes as in rms_norm."""
    residual += x
    return rms_norm(residual, weight, eps), residual
