"""Matrices as a CPU's products want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Compute x W^T [T, N] from x [T, K]."""


@dataclass(frozen=True)
class OpaqueWeight:
    """A matrix in memory of a library, which torch does not know."""

    handle: object
    """Keeps the memory."""
    nbytes: int
    """Size of the memory."""


Kept = Tensor | OpaqueWeight | tuple[Tensor | OpaqueWeight, ...]
"""The memory that a layout keeps a matrix in."""
LaidOut = tuple[Product, Kept]
"""A product, and the memory that it keeps the matrix in."""


def operator(namespace: str, name: str) -> Callable[..., Any] | None:
    """Return one of torch's operators; None if it is missing."""
    found: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), name, None)
    return found
