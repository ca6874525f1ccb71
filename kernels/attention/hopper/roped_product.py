"""Queries, keys and values of many tokens on a Hopper GPU, as attention takes them, in one kernel.

The kernel is kernels/cuda/source/roped_product.cu: the product of x and the projections' matrix,
which ends in what kernels/attention/qkv_rope_triton.py does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.hopper.rows_of_cache import is_readable
from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.products.hopper import row_products
from sidestep.kernels.products.hopper.row_products import RowKernel
from sidestep.kernels.unfinished_product import PendingProduct

_KERNEL = RowKernel("roped_product")
_DIMS = (64, 128)


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    dim: int
    norms: bool
    bias: bool


class _Operands(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "bias",
                "positions",
                "slots",
                "cos",
                "sin",
                "q_norm",
                "k_norm",
                "queries",
                "cache",
            )
        ),
        ("block_stride", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("num_heads", "kept_heads", "page")),
        ("eps", ctypes.c_float),
    )


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    options = {"DIM": form.dim, "WITH_NORMS": int(form.norms), "WITH_BIAS": int(form.bias)}
    return _KERNEL.compiled(form.dtype, options)


def _kernel(file: Path, _: Form) -> Kernel:
    return _KERNEL.loaded(file)


_KERNELS = Kernels(compiled, _kernel)


def takes(qkv: PendingProduct, rope: Rope, cache: Tensor) -> bool:
    """Return whether the kernel takes such norms, and such a cache [blocks, 2 KVH, block size, D].

    The product itself is one that `row_products.suits` takes.
    """
    dtype = qkv.x.dtype
    plain = all(norm.dtype == dtype for norm in rope.norms or ())
    return plain and is_readable(cache, dtype, _DIMS)


def project(
    qkv: PendingProduct,
    positions: Tensor,
    slot_mapping: Tensor,
    rope: Rope,
    cache: Tensor,
    num_heads: int,
) -> Tensor:
    """Return the queries [T, H * D], rotated, and write keys (rotated) and values to the cache.

    The product is [T, (H + 2 KVH) * D]. positions, slot_mapping, cache: see qkv_rope, whose
    rounding this has too.
    """
    x, weight, bias = qkv
    _, kept_heads, page, dim = cache.shape
    queries = x.new_empty(len(x), num_heads * dim)
    form = Form(x.dtype, dim, rope.norms is not None, bias is not None)
    kernel = _KERNELS.to_launch(form, x)
    if kernel is None:
        return queries
    read = (bias, positions, slot_mapping, rope.cos, rope.sin, *(rope.norms or (None, None)))
    operands = _Operands(
        *(None if one is None else one.data_ptr() for one in (*read, queries, cache)),
        cache.stride(0),
        num_heads,
        kept_heads,
        page,
        rope.eps,
    )
    row_products.launch(kernel, x, weight, operands, len(weight))
    return queries
