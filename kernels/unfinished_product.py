"""Products of which a part is left to the kernel that reads them next, or all of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class UnscaledProduct(NamedTuple):
    """A product of codes that is still to be scaled."""

    product: Tensor
    """[T, N], in the run's type."""
    rows: Tensor
    """float32 [T, 1]: what each row is multiplied with."""
    columns: Tensor
    """float32 [1, N]: what each column is multiplied with."""


class PendingProduct(NamedTuple):
    """A product of many rows that is still to be computed: x W^T + b, [T, N]."""

    x: Tensor
    """[T, K]"""
    weight: Tensor
    """[N, K]"""
    bias: Tensor | None
    """[N]"""


Product = Tensor | UnscaledProduct | PendingProduct


def finished(x: Product) -> Tensor:
    """Return a product, computed and with its scales, in its type."""
    if isinstance(x, PendingProduct):
        return torch.nn.functional.linear(*x)
    if isinstance(x, UnscaledProduct):
        return (x.product * (x.rows * x.columns)).to(x.product.dtype)
    return x


def without_scales(x: Tensor | UnscaledProduct) -> Tensor:
    """Return a product whose scales are not applied; return a tensor as it is."""
    return x.product if isinstance(x, UnscaledProduct) else x
