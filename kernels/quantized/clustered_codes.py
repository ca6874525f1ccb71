"""x W^T for more than 64 rows of x, where W is in codes of four bits, by clusters of processors.

The kernel is kernels/cuda/source/coded_product.cu, for Hopper.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, launches, runs_or_compiles, tile_map
from sidestep.kernels.cuda.wgmma_source import wgmma_source
from sidestep.kernels.gpu import gpu_of
from sidestep.kernels.launch import cdiv, num_processors
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

_ROWS, _MOST_TOKENS = 128, 256
"""Rows of W of a tile, and the most rows of x."""
_THREADS, _MULTIPLYING = 384, 256
_RING = 224 << 10
"""Bytes of a processor's shared memory for tiles."""
_MOST_STAGES, _LEAST_STEPS = 8, 4
"""Steps in the ring at most, and those of a cluster at least."""


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    tokens: int
    """Rows of x of a tile, a multiple of 16."""
    group: int
    """Columns that share a scale; 0 for all."""
    zeros: bool
    add: bool
    bias: bool

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step in the ring."""
        return _ROWS * STEP // 2 + self.tokens * STEP * 2

    @property
    def stages(self) -> int:
        """Steps in the ring."""
        return min(_MOST_STAGES, _RING // self.stage_bytes)


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "tokens",
            "outputs",
            "steps",
            "token_tiles",
            "pairs",
            "out_stride",
            "height",
            "groups",
            "across",
        )
    )


class _Workspace:
    """Parts of tiles, and counters that are zero between kernels."""

    def __init__(self, device: torch.device) -> None:
        # A cluster leaves two parts at most, and each has two tiles of W.
        parts = 2 * num_processors(device)
        sums = _ROWS * _MOST_TOKENS
        self.partials = torch.empty(parts, sums, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)


_workspace_of = functools.cache(_Workspace)
"""The workspace of a device. There is one for all kernels, since they follow one another."""


@functools.cache
def _kernel(form: Form) -> Kernel:
    shared = form.stages * form.stage_bytes
    return Kernel(compiled(form), "coded_product", threads=_THREADS, shared=shared)


def compiled(form: Form) -> bytes:
    """Return the machine code for this form."""
    half = form.dtype == torch.float16
    defines: dict[str, int | str] = {
        "TOKENS": form.tokens,
        "STAGES": form.stages,
        "HALF": int(half),
        "ZEROS": int(form.zeros),
        "GROUP": form.group,
        "OUT": int(form.add),
        "WITH_BIAS": int(form.bias),
    }
    instruction = wgmma_source(form.tokens, "f16" if half else "bf16", 16, registers=True)
    return cubin("coded_product", defines, {"wgmma.cuh": instruction})


def takes(x: Tensor, matrix: DeviceMatrix) -> bool:
    """Return whether the kernel multiplies this matrix here."""
    gpu = gpu_of(x.device)
    hopper = gpu is not None and gpu.capability == 90 and runs_or_compiles(x)
    simple = matrix.kind == "int4" and matrix.minimums is None and matrix.group[1] % STEP == 0
    aligned = matrix.shape[0] % 8 == 0 and matrix.shape[1] % 8 == 0
    return hopper and simple and aligned and x.dtype != torch.float32 and compiles()


def tokens_of_tile(tokens: int) -> int:
    """Return the rows of x of a tile, so that few are empty."""
    tiles = cdiv(tokens, _MOST_TOKENS)
    return cdiv(cdiv(tokens, tiles), 16) * 16


def launch(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """Write x W^T + b to out [T, N], or add it."""
    tokens, (outputs, inputs) = len(x), matrix.shape
    height, width = matrix.group
    tile = tokens_of_tile(tokens)
    form = Form(x.dtype, tile, width, matrix.zeros, add, bias is not None)
    kernel = _kernel(form)
    if not launches(x):
        return
    steps, token_tiles = cdiv(inputs, STEP), cdiv(tokens, tile)
    pairs = cdiv(outputs, 2 * _ROWS)
    all_steps = pairs * token_tiles * steps
    clusters = max(1, min(num_processors(x.device) // 2, all_steps // _LEAST_STEPS))
    workspace = _workspace_of(x.device)
    groups = cdiv(inputs, width) if width else 1
    across = cdiv(outputs, height)
    kernel.launch(
        2 * clusters,
        [
            tile_map(x, tile // 2, 128),
            tile_map(matrix.words.view(torch.uint8), _ROWS, STEP // 2),
            ctypes.c_void_p(matrix.scales.data_ptr()),
            ctypes.c_void_p(None if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(workspace.partials.data_ptr()),
            ctypes.c_void_p(workspace.counters.data_ptr()),
            _Sizes(
                tokens,
                outputs,
                steps,
                token_tiles,
                pairs,
                out.stride(0),
                height,
                groups,
                across,
            ),
        ],
        early=True,
    )
