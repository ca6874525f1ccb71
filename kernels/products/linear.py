"""x W^T + b on a GPU, with the operations around it in a layer.

The kernel that reads W fastest computes it: the project's own for a few rows, the library's for
more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidestep.kernels.gpu import is_hopper, on_gpu
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream, normed
from sidestep.kernels.ops.silu_mul import silu_mul
from sidestep.kernels.unfinished_product import PendingProduct

if TYPE_CHECKING:
    from sidestep.kernels.products.own_linear import Config

_HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS, _MANY_ROWS, _WIDE = 16, 33, 2048
"""Numbers of rows up to which and from which on a product begins the next norm, and the width of
streams where it does for any number of rows."""


def _begins_norm(rows: int, width: int, dtype: torch.dtype) -> bool:
    """Return whether a product that adds to a stream begins the next norm.

    It does where whole steps were measured to be faster. A step of Qwen3-0.6B with 24 rows takes
    15% longer with begun norms, one with 40 rows 4% less. It does not in float16: a stream that is
    not scaled yet may be too large for float16.
    """
    measured = rows <= _FEW_ROWS or rows >= _MANY_ROWS or width >= _WIDE
    return measured and dtype == torch.bfloat16


def _own(x: Tensor, weight: Tensor, gated: bool = False) -> Config | None:
    """Return the configuration of our own kernel, or None if the library's is faster."""
    if not on_gpu(x) or x.dtype not in _HALF:
        return None
    from sidestep.kernels.products.own_linear import choose

    return choose(
        x.shape[0],
        weight.shape[0] // (1 + gated),
        weight.shape[1],
        gated,
        hopper=is_hopper(x.device),
    )


def _product(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the product by our own kernel, or None if the library's is faster."""
    config = _own(x.hidden if isinstance(x, Stream) else x, weight, gated)
    if config is None:
        return None
    from sidestep.kernels.products.own_linear import own_linear

    return own_linear(x, weight, bias, gated=gated, config=config, out=out)


def _gated_product(x: Tensor | Stream, weight: Tensor) -> Tensor | None:
    """Return the gated product by the kernel that ends in the activation; None where it is slower.

    It takes more rows than _product does.
    """
    hidden = x.hidden if isinstance(x, Stream) else x
    if not on_gpu(hidden) or hidden.dtype not in _HALF:
        return None
    from sidestep.kernels.products.gated.gated_gemm_triton import choose, gated_gemm
    from sidestep.kernels.products.hopper import gated_hopper

    if gated_hopper.suits(hidden, weight):
        return gated_hopper.gated_product(normed(x), weight)
    config = choose(hidden.shape[0], weight.shape[0] // 2, weight.shape[1], hidden.device)
    return None if config is None else gated_gemm(normed(x), weight, config=config)


def linear(
    x: Tensor | Stream, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b, [T, N], which is `out` if that is given.

    x is [T, K], or a stream whose norm is multiplied; W is [N, K] and b is [N].
    """
    product = _product(x, weight, bias, out=out)
    if product is not None:
        return product
    if out is None:
        return torch.nn.functional.linear(normed(x), weight, bias)
    return (
        torch.mm(normed(x), weight.t(), out=out)
        if bias is None
        else torch.addmm(bias, normed(x), weight.t(), out=out)
    )


def unfinished_linear(
    x: Tensor | Stream, weight: Tensor, bias: Tensor | None
) -> Tensor | PendingProduct:
    """Return x W^T + b, or what it consists of where the kernel that reads it next may compute it.

    It may where the library would multiply: there are many rows.
    """
    hidden = x.hidden if isinstance(x, Stream) else x
    if on_gpu(hidden):
        from sidestep.kernels.products.hopper import row_products

        if row_products.suits(hidden, weight):
            return PendingProduct(normed(x), weight, bias)
    return linear(x, weight, bias)


def gated_linear(x: Tensor | Stream, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up, [T, F], of x W^T + b = [gate | up] with W [2 F, K]."""
    if bias is None:
        out = _product(x, weight, bias, gated=True)
        if out is None:
            out = _gated_product(x, weight)
        if out is not None:
            return out
    return silu_mul(linear(x, weight, bias))


def add_linear(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None
) -> BegunNorm | None:
    """Add x W^T + b to residual [T, N], in place.

    norm: the norm that the sum goes through next. Return the part of it that was computed on the
    way, or None.
    """
    config = _own(x, weight)
    if config is None:
        if bias is not None:
            residual += bias
        residual.addmm_(x, weight.t())
        return None
    from sidestep.kernels.products.own_linear import add_own_linear

    begins = _begins_norm(x.shape[0], weight.shape[0], x.dtype)
    return add_own_linear(residual, x, weight, bias, norm=norm if begins else None, config=config)
