"""x W^T + b on a GPU, by whichever kernel reads W fastest: our own for a few rows, the library's for more."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.silu_mul import silu_mul

_SKINNY_ROWS = 16
_HALF = (torch.bfloat16, torch.float16)


def _is_skinny(x: Tensor) -> bool:
    return x.shape[0] <= _SKINNY_ROWS and x.is_cuda and x.dtype in _HALF


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], W [N, K], b [N]; returns [T, N]."""
    if _is_skinny(x):
        from sidestep.kernels.skinny_linear_triton import skinny_linear

        return skinny_linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up, of x W^T + b = [gate | up] with W [2 F, K]; returns [T, F]."""
    if _is_skinny(x) and bias is None:
        from sidestep.kernels.skinny_linear_triton import skinny_linear

        return skinny_linear(x, weight, gated=True)
    return silu_mul(linear(x, weight, bias))
