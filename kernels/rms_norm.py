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
    if x.is_cuda and x.dim() == 2:
        from sidestep.kernels.rms_norm_triton import rms_norm as launch

        return launch(x, weight, eps)
    wide = x.float()
    # The fewest operations count for a few rows: the mean of squares comes from the norm, which is a single one.
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_epsilon(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is written over `residual`. Shapes as in rms_norm."""
    if x.is_cuda:
        from sidestep.kernels.rms_norm_triton import add_rms_norm as launch

        return launch(x, residual, weight, eps), residual
    residual += x
    return rms_norm(residual, weight, eps), residual


@functools.cache
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((1,), eps, device=device)
