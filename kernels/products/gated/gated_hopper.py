"""silu(x gate^T) * (x up^T) for many rows on a Hopper GPU, as one product that ends in it.

The kernel is kernels/cuda/source/gated_product.cu. The library's product would write gates and ups,
which a kernel of its own would read again.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels, runs_or_compiles
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
"""Rows from which on the kernel is used, if as much of its tiles in all turns is needed."""


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("rows", "row_bytes", "outputs", "parts"))


def compiled(dtype: torch.dtype) -> Path:
    """Return the file of the machine code for numbers of this type."""
    half = dtype == torch.float16
    defines = {"W_STAGES": _W_STAGES, "X_STAGES": _X_STAGES, "HALF": int(half)}
    instruction = wgmma_source(_COLUMNS, kind_of(dtype), 16)
    return cubin("gated_product", defines, {"wgmma.cuh": instruction})


def _kernel(file: Path, _: torch.dtype) -> Kernel:
    return Kernel(file, "gated_product", threads=_THREADS, shared=_SHARED)


_KERNELS = Kernels(compiled, _kernel)


def _items(tokens: int, outputs: int) -> int:
    """Return the pairs of tiles: a cluster of two blocks takes one at a time."""
    return cdiv(tokens, 2 * _ROWS) * cdiv(outputs, _COLUMNS // 2)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes x [T, K] and W [2 F, K], and is most likely the faster way.

    It is not where the last turn of its clusters leaves much undone.
    """
    tokens, outputs = len(x), weight.shape[0] // 2
    if tokens < _LEAST_ROWS or not (is_hopper(x.device) and runs_or_compiles(x) and compiles()):
        return False
    clusters = num_processors(x.device) // 2
    turns = cdiv(_items(tokens, outputs), clusters)
    filled = tokens * outputs / (turns * clusters * _ROWS * _COLUMNS)
    return filled >= _LEAST_FILLED and _takes(x, weight)


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the copy engine reads these tensors."""
    halves = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return halves and weight.shape[0] % 16 == 0 and can_be_tiled(x, weight)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x gate^T) * (x up^T), [T, F], of x [T, K] and W [2 F, K], the gate's rows first.

    Rows of x may lie apart. Rounding is that of separate kernels.
    """
    (tokens, inputs), outputs = x.shape, weight.shape[0] // 2
    out = x.new_empty(tokens, outputs)
    kernel = _KERNELS.to_launch(x.dtype, x)
    if kernel is None:
        return out
    items = _items(tokens, outputs)
    clusters = min(items, num_processors(x.device) // 2)
    kernel.launch(
        2 * clusters,
        [
            tile_map(x, _ROWS, _STEP_BYTES),
            tile_map(weight, _COLUMNS // 2, _STEP_BYTES),
            ctypes.c_void_p(out.data_ptr()),
            _Sizes(tokens, inputs * x.itemsize, outputs, cdiv(outputs, _COLUMNS // 2)),
            ctypes.c_int(items),
        ],
    )
    return out
