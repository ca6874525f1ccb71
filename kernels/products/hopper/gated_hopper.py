"""silu(x gate^T) * (x up^T) for many rows on a Hopper GPU, as one product that ends in it.

The kernel is kernels/cuda/source/gated_product.cu.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.products.hopper import row_products
from sidestep.kernels.products.hopper.row_products import RowKernel

_KERNEL = RowKernel("gated_product")
_ALIGNED = 16
"""Rows of the matrix are a multiple of this."""


def compiled(dtype: torch.dtype) -> Path:
    """Return the file of the machine code for numbers of this type."""
    return _KERNEL.compiled(dtype, {})


def _kernel(file: Path, _: torch.dtype) -> Kernel:
    return _KERNEL.loaded(file)


_KERNELS = Kernels(compiled, _kernel)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes x [T, K] and W [2 F, K], and is most likely faster."""
    return weight.shape[0] % _ALIGNED == 0 and row_products.suits(x, weight)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x gate^T) * (x up^T), [T, F], of x [T, K] and W [2 F, K], the gate's rows first.

    Rows of x may lie apart. Rounding is that of separate kernels.
    """
    outputs = weight.shape[0] // 2
    out = x.new_empty(len(x), outputs)
    kernel = _KERNELS.to_launch(x.dtype, x)
    if kernel is not None:
        row_products.launch(kernel, x, weight, ctypes.c_void_p(out.data_ptr()), outputs)
    return out
