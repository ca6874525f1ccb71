"""The cache as kernels for Hopper read it, and what each of them is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.cuda.launcher import runs_or_compiles
from sidestep.kernels.gpu import is_hopper

LEAST_PAGE = 16
"""Tokens of which a block of the cache has a multiple, so that a box lies in one."""


@dataclass(frozen=True)
class CacheForm:
    """A form of such a kernel."""

    dtype: torch.dtype
    dim: int
    group: int
    """Query heads of a KV head."""
    box: int
    """Keys that certainly lie in one block of the cache."""
    window: int
    sinks: bool

    @property
    def options(self) -> dict[str, int | str]:
        """Options of the compiler."""
        return {
            "DIM": self.dim,
            "GROUP": self.group,
            "BOX": self.box,
            "WINDOW": self.window,
            "SINKS": int(self.sinks),
            "HALF": int(self.dtype == torch.float16),
        }


def is_readable(cache: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> bool:
    """Return whether kernels for Hopper read a cache [blocks, 2 KVH, block size, D].

    It has numbers of 16 bits in the type of the queries, and heads of one of these sizes.
    """
    if not (is_hopper(cache.device) and runs_or_compiles(cache) and compiles()):
        return False
    _, _, page, dim = cache.shape
    plain = cache.dtype == dtype and dtype in (torch.bfloat16, torch.float16)
    rows_of_dim = cache.stride()[1:] == (page * dim, dim, 1) and cache.stride(0) % dim == 0
    return plain and dim in dims and page % LEAST_PAGE == 0 and rows_of_dim


def rows_of(cache: Tensor) -> Tensor:
    """Return all rows of a cache, [rows, D]. Between its blocks there may be others."""
    blocks, heads, page, dim = cache.shape
    rows = (blocks - 1) * (cache.stride(0) // dim) + heads * page
    return cache.as_strided((rows, dim), (dim, 1))
