"""x W^T for more than 64 rows of x, where W is in codes of four bits, by clusters of processors.

The kernel is kernels/cuda/source/coded_product.cu, for Hopper. It may end in a gated activation.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels, runs_or_compiles
from sidestep.kernels.cuda.tile_maps import tile_map
from sidestep.kernels.cuda.wgmma_source import kind_of, wgmma_source
from sidestep.kernels.launch import cdiv, free_processors, num_processors
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

_ROWS = 128
"""Rows of W of a tile."""
_TOKENS = (96, 128, 160, 192, 256)
"""Rows of x of a tile. Each number is a kernel of its own, so they are few."""
_STEP_US, _TOKEN_US, _TILE_US = 0.25, 0.004, 0.055
"""Microseconds of a step, of each row of x in it, and of each row for the ends of a tile."""
_THREADS = 384
_RING = 224 << 10
"""Bytes of a processor's shared memory for tiles."""
_MOST_STAGES, _LEAST_STEPS = 8, 4
"""Steps in the ring at most, and those of a cluster at least."""
_MOST_TILES = 1 << 15
_IN_L2 = 2048
"""Rows of x that stay in L2 beside what else is in use."""


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    tokens: int
    """Rows of x of a tile."""
    group: int
    """Columns that share a scale; 0 for all."""
    zeros: bool
    gated: bool
    bias: bool

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step in the ring: of codes, x and scales."""
        return _ROWS * STEP // 2 + self.tokens * STEP * 2 + _ROWS * 4

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
        # A cluster leaves one part at most, of two tiles of W.
        parts = num_processors(device)
        sums = _ROWS * max(_TOKENS)
        self.partials = torch.empty(parts, sums, dtype=torch.float32, device=device)
        self.counters = torch.zeros(2 * _MOST_TILES, dtype=torch.int32, device=device)


_workspace_of = functools.cache(_Workspace)
"""The workspace of a device. There is one for all kernels, since they follow one another."""


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    half = form.dtype == torch.float16
    defines: dict[str, int | str] = {
        "TOKENS": form.tokens,
        "STAGES": form.stages,
        "HALF": int(half),
        "ZEROS": int(form.zeros),
        "GROUP": form.group,
        "GATED": int(form.gated),
        "WITH_BIAS": int(form.bias),
    }
    instruction = wgmma_source(form.tokens, kind_of(form.dtype), 16, registers=True)
    return cubin("coded_product", defines, {"wgmma.cuh": instruction})


def _kernel(file: Path, form: Form) -> Kernel:
    shared = form.stages * form.stage_bytes
    return Kernel(file, "coded_product", threads=_THREADS, shared=shared)


_KERNELS = Kernels(compiled, _kernel)


def takes(matrix: DeviceMatrix) -> bool:
    """Return whether the kernel multiplies a matrix that the kernels for Hopper take."""
    fits = matrix.kind == "int4" and matrix.shape[0] % 16 == 0 and matrix.shape[1] % 8 == 0
    return fits and runs_or_compiles(matrix.words) and compiles()


def multiply(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, *, gated: bool) -> Tensor:
    """Return x W^T + b, [T, N]; or silu(gate) * up, [T, F], of x W^T + b = [gate | up]."""
    outputs = matrix.shape[0] // (1 + gated)
    out = x.new_empty(len(x), outputs)
    launch(x, matrix, bias, out, gated=gated)
    return out


def launch(
    x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor, *, gated: bool = False
) -> None:
    """Write the product to out, or the activation. Rows of x and out may lie apart."""
    at_once = _at_once(len(x)) if gated else len(x)
    for begin in range(0, len(x), at_once):
        rows = slice(begin, begin + at_once)
        _launch(x[rows], matrix, bias, out[rows], gated)


def _at_once(tokens: int) -> int:
    """Return the rows of a launch: parts of whole tiles, as equal as may be.

    Clusters read all rows of x again and again, and a part of them stays in L2. The wide matrix of
    a gate and up is read once more for it.
    """
    tiles = cdiv(tokens, max(_TOKENS))
    return cdiv(tiles, max(1, round(tokens / _IN_L2))) * max(_TOKENS)


def _launch(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor, gated: bool) -> None:
    (outputs, inputs), (height, width) = matrix.shape, matrix.group
    processors, steps = free_processors(x.device), cdiv(inputs, STEP)
    pairs = cdiv(outputs, 2 * _ROWS)
    tile = _tile(len(x), pairs * steps, processors)
    form = Form(x.dtype, tile, width, matrix.zeros, gated, bias is not None)
    kernel = _KERNELS.to_launch(form, x)
    if kernel is None:
        return
    token_tiles = cdiv(len(x), tile)
    assert pairs * token_tiles <= _MOST_TILES
    clusters = min(processors // 2, max(1, pairs * token_tiles * steps // _LEAST_STEPS))
    workspace = _workspace_of(x.device)
    sizes = _Sizes(
        len(x),
        outputs // (1 + gated),
        steps,
        token_tiles,
        pairs,
        out.stride(0),
        height,
        cdiv(inputs, width) if width else 1,
        cdiv(outputs, height),
    )
    kernel.launch(
        2 * clusters,
        [
            tile_map(x, tile // 2, 128),
            tile_map(matrix.words.view(torch.uint8), _ROWS // (1 + gated), STEP // 2),
            ctypes.c_void_p(matrix.scales.data_ptr()),
            ctypes.c_void_p(None if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(workspace.partials.data_ptr()),
            ctypes.c_void_p(workspace.counters.data_ptr()),
            sizes,
        ],
    )


def _tile(tokens: int, steps: int, processors: int) -> int:
    """Return the rows of x of a tile that take the least time by a rule.

    steps: those of all pairs of tiles of W.
    """

    def took_us(tile: int) -> float:
        each = cdiv(tokens, tile) * steps / (processors // 2)
        return each * (_STEP_US + _TOKEN_US * tile) + _TILE_US * tile

    return min(_TOKENS, key=took_us)
