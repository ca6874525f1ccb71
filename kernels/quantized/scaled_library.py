"""x W^T where both are in FP8, with a scale a row, by the library's product for that."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sidestep.kernels.ops.rms_norm import QuantizedRows
from sidestep.kernels.quantized.device_matrix import DeviceMatrix

_ALIGNED = 16
"""Sizes of matrices must be multiples of this."""


@functools.cache
def _one(device: torch.device) -> Tensor:
    """Return 1 on a device. A run of all sizes comes before the capture of a graph."""
    return torch.ones((), dtype=torch.float32, device=device)


def _like_product(x: QuantizedRows, matrix: DeviceMatrix) -> Tensor:
    """Return a product without memory. Not every version of torch has one of `_scaled_mm`."""
    return x.codes.new_empty(len(x.codes), matrix.shape[0], dtype=matrix.dtype)


def suits_library(matrix: DeviceMatrix) -> bool:
    """Return whether the library multiplies this matrix with rows in 8 bits."""
    return matrix.rounded == "fp8" and matrix.group[1] == 0 and matrix.shape[0] % _ALIGNED == 0


def unscaled_by_library(x: QuantizedRows, matrix: DeviceMatrix) -> Tensor:
    """Return the product of the codes, [T, N]: each is still to be scaled.

    The library has other kernels for it, which are faster for some hundred rows. Sums of products
    of e4m3 fit into bfloat16, but not into float16.
    """
    assert matrix.dtype == torch.bfloat16
    if x.codes.is_meta:
        return _like_product(x, matrix)
    weight = matrix.words.view(x.codes.dtype)
    if not x.codes.is_cuda:
        return (x.codes.float() @ weight.float().t()).to(matrix.dtype)
    return torch._scaled_mm(
        x.codes,
        weight.t(),
        scale_a=_one(x.codes.device),
        scale_b=_one(x.codes.device),
        out_dtype=matrix.dtype,
        use_fast_accum=False,
    )


def scaled_by_library(
    x: QuantizedRows, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b, [T, N], in the type of the matrix's products.

    Columns of codes are in another order than the matrix's, which is the same for both, so that no
    sum changes. Sums are promoted to float32 on the way: the fast ones keep 14 bits. out: memory
    for the result.
    """
    if x.codes.is_meta:
        return _like_product(x, matrix) if out is None else out
    weight = matrix.words.view(x.codes.dtype)
    if not x.codes.is_cuda:
        product = (x.codes.float() * x.scales) @ (weight.float() * matrix.scales.t()).t()
        product = (product if bias is None else product + bias).to(matrix.dtype)
        return product if out is None else out.copy_(product)
    product = torch._scaled_mm(
        x.codes,
        weight.t(),
        scale_a=x.scales,
        scale_b=matrix.scales,
        out_dtype=matrix.dtype,
        use_fast_accum=False,
        out=out,
    )
    return product if bias is None else product.add_(bias)
