"""x W^T + b on a GPU, with what lies around it in a layer, by whichever kernels read W fastest: our own for a few rows,
the library's for more."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.rms_norm import RmsNorm
from sidestep.kernels.silu_mul import silu_mul

_HALF = (torch.bfloat16, torch.float16)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None, *, gated: bool = False,
             residual: Tensor | None = None) -> Tensor | None:
    """By our own kernel, if there is one that is faster than the library's."""
    if not x.is_cuda or x.dtype not in _HALF:
        return None
    from sidestep.kernels.skinny_linear_triton import choose, skinny_linear

    config = choose(x.shape[0], weight.shape[0] // (1 + gated), weight.shape[1], gated)
    if config is None:
        return None
    return skinny_linear(x, weight, bias, norm=norm, gated=gated, residual=residual, config=config)


def _gated_product(x: Tensor, weight: Tensor, norm: RmsNorm | None) -> Tensor | None:
    """With more rows than _product takes, by the kernel that ends in the activation, where it is faster."""
    if not x.is_cuda or x.dtype not in _HALF:
        return None
    from sidestep.kernels.gated_gemm_triton import choose, gated_gemm

    config = choose(x.shape[0], weight.shape[0] // 2, weight.shape[1], x.device)
    return None if config is None else gated_gemm(x if norm is None else norm(x), weight, config=config)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None) -> Tensor:
    """x [T, K], normed first if there is a norm; W [N, K], b [N]; returns [T, N]."""
    out = _product(x, weight, bias, norm)
    if out is None:
        out = torch.nn.functional.linear(x if norm is None else norm(x), weight, bias)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None) -> Tensor:
    """silu(gate) * up, of x W^T + b = [gate | up] with W [2 F, K]; returns [T, F]."""
    if bias is None:
        out = _product(x, weight, bias, norm, gated=True)
        if out is None:
            out = _gated_product(x, weight, norm)
        if out is not None:
            return out
    return silu_mul(linear(x, weight, bias, norm))


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual [T, N] + x W^T + b, written over residual, which is returned."""
    if _product(x, weight, bias, residual=residual) is None:
        if bias is not None:
            residual += bias
        residual.addmm_(x, weight.t())
    return residual
