"""Weights that a kernel asks L2 for because others read them soon."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ahead(NamedTuple):
    """Weights that kernels behind a norm read, and that wait in L2 if a GPU's norm asks for them.

    It pays where the memory would be at rest until those kernels begin. No result depends on it.
    """

    first: Tensor
    """Contiguous: all that the next kernel reads, which must not wait behind the others."""
    then: Tensor
    """[N, R, K]: what a later one reads first; R rows of each of N matrices, each contiguous."""
