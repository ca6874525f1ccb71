"""Products of many rows on a Hopper GPU whose kernels turn the sums into their results themselves.

The library would write a product that another kernel reads again. Both kernels share
kernels/cuda/include/row_products.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, runs_or_compiles
from sidestep.kernels.cuda.tile_maps import can_be_tiled, tile_map
from sidestep.kernels.cuda.wgmma_source import kind_of, wgmma_source
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import cdiv, num_processors

_ROWS, _COLUMNS, _STEP_BYTES = 128, 256, 128
"""Rows of x and of the matrix in a block's tile, and bytes of a row in a step."""
_W_STAGES, _X_STAGES = 4, 5
"""Steps that are loading at once."""
_THREADS = 384
_SHARED = (_W_STAGES * _COLUMNS + _X_STAGES * _ROWS) * _STEP_BYTES
_LEAST_ROWS, _LEAST_FILLED = 512, 0.9
"""Rows from which on such kernels are used, if as much of their tiles in all turns is needed."""


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("rows", "row_bytes", "outputs", "parts"))


@dataclass(frozen=True)
class RowKernel:
    """One of these kernels."""

    name: str

    def compiled(self, dtype: torch.dtype, options: Mapping[str, int | str]) -> Path:
        """Return the file of the machine code for numbers of a type."""
        half = dtype == torch.float16
        defines = {"W_STAGES": _W_STAGES, "X_STAGES": _X_STAGES, "HALF": int(half)}
        instruction = wgmma_source(_COLUMNS, kind_of(dtype), 16)
        return cubin(self.name, defines | dict(options), {"wgmma.cuh": instruction})

    def loaded(self, file: Path) -> Kernel:
        """Return the kernel from its file."""
        return Kernel(file, self.name, threads=_THREADS, shared=_SHARED)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether such a kernel takes x [T, K] and W [N, K], and is most likely the faster way.

    It is not where the last turn of its clusters leaves much undone.
    """
    rows, outputs = len(x), weight.shape[0]
    if rows < _LEAST_ROWS or not (is_hopper(x.device) and runs_or_compiles(x) and compiles()):
        return False
    clusters = num_processors(x.device) // 2
    turns = cdiv(_items(rows, outputs), clusters)
    filled = rows * outputs / (turns * clusters * 2 * _ROWS * _COLUMNS)
    halves = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return filled >= _LEAST_FILLED and halves and can_be_tiled(x, weight)


def launch(kernel: Kernel, x: Tensor, weight: Tensor, operands: object, outputs: int) -> None:
    """Launch a kernel for x [T, K] and W [N, K]. Rows of x may lie apart.

    operands: what it takes beside them, a ctypes object. outputs: columns of its result.
    """
    items = _items(len(x), len(weight))
    clusters = min(items, num_processors(x.device) // 2)
    kernel.launch(
        2 * clusters,
        [
            tile_map(x, _ROWS, _STEP_BYTES),
            tile_map(weight, _COLUMNS // 2, _STEP_BYTES),
            operands,
            _Sizes(len(x), x.shape[1] * x.itemsize, outputs, cdiv(len(weight), _COLUMNS)),
            ctypes.c_int(items),
        ],
    )


def _items(rows: int, outputs: int) -> int:
    """Return the pairs of tiles: a cluster of two blocks takes one at a time."""
    return cdiv(rows, 2 * _ROWS) * cdiv(outputs, _COLUMNS)
