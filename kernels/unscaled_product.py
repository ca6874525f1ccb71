"""A product of codes whose scales are left to the kernel that reads it next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class UnscaledProduct(NamedTuple):
    """A product of codes that is still to be scaled."""

    product: Tensor
    """[T, N], in the run's type."""
    rows: Tensor
    """float32 [T, 1]: what each row is multiplied with."""
    columns: Tensor
    """float32 [1, N]: what each column is multiplied with."""


def scaled(x: Tensor | UnscaledProduct) -> Tensor:
    """Return a product with its scales, in its type; return a tensor as it is."""
    if isinstance(x, UnscaledProduct):
        return (x.product * (x.rows * x.columns)).to(x.product.dtype)
    return x


def without_scales(x: Tensor | UnscaledProduct) -> Tensor:
    """Return a product whose scales are not applied; return a tensor as it is."""
    return x.product if isinstance(x, UnscaledProduct) else x
