"""The products of experts for many pairs, by clusters of a Hopper GPU's processors.

The kernel is kernels/cuda/source/expert_products.cu. The pairs are sorted by expert
(sorted_pairs.py). Inner values lie in their sorted order.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.cuda.tile_maps import tile_map
from sidestep.kernels.cuda.wgmma_source import kind_of, wgmma_source
from sidestep.kernels.experts.common.cuda_options import Activation, options_of
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.launch import cdiv, num_processors
from sidestep.kernels.quantized.device_matrix import STEP
from sidestep.kernels.quantized.quantize_rows_triton import quantize_rows

PAIRS = 128
"""Pairs of a tile."""
_COLUMNS, _STEP_BYTES = 256, 128
"""Rows of a matrix in a tile, of gate and up together, and bytes of a row in a step."""
_THREADS = 384


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    """Type of biases and results."""
    eight: bool
    """Whether both operands are in e4m3."""
    row_scales: bool
    bias: bool
    chosen: int
    gated: bool = False
    activation: Activation = (False, None, None)

    @property
    def stages(self) -> tuple[int, int]:
        """Steps of the matrix and of inputs that are loading at once.

        Gate and up in 16 bits are faster with more of the matrix.
        """
        return (5, 4) if self.gated and not self.eight else (4, 5)

    @property
    def shared(self) -> int:
        """Bytes of the rings."""
        w_stages, x_stages = self.stages
        return (w_stages * _COLUMNS + x_stages * PAIRS) * _STEP_BYTES


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("pairs", "row_bytes", "outputs", "parts"))


class _Scales(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("x", "w", "inner"))


class _Values(NamedTuple):
    """Rows of numbers in 16 bits, or of codes with their scales."""

    rows: Tensor
    scales: Tensor | None = None


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    options = options_of(form.dtype, form.activation, form.chosen, bias=form.bias) | {
        "GATED": int(form.gated),
        "EIGHT": int(form.eight),
        "ROW_SCALES": int(form.row_scales),
        "W_STAGES": form.stages[0],
        "X_STAGES": form.stages[1],
    }
    if form.eight:
        instruction = wgmma_source(_COLUMNS // 2, "e4m3", 32)
    else:
        instruction = wgmma_source(_COLUMNS, kind_of(form.dtype), 16)
    return cubin("expert_products", options, {"wgmma.cuh": instruction})


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, "expert_products", threads=_THREADS, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def memory_of(matrix: ExpertMatrix | ExpertCodes) -> Tensor:
    """Return the memory of all experts' numbers, or of their codes."""
    return matrix.values if isinstance(matrix, ExpertMatrix) else matrix.words


def takes(gate_up: ExpertMatrix | ExpertCodes, down: ExpertMatrix | ExpertCodes) -> bool:
    """Return whether the kernels take matrices of this form.

    They are in 16 bits; or in e4m3 with inputs that may be rounded, and with a scale for each
    128 x 128 numbers or for each row.
    """
    if gate_up.num_rows % 16 or down.num_rows % 8:
        return False
    if isinstance(gate_up, ExpertMatrix) or isinstance(down, ExpertMatrix):
        return True
    blocks = gate_up.num_rows % (2 * STEP) == 0 and down.num_rows % STEP == 0
    forms = ((1, 0), (STEP, STEP)) if blocks else ((1, 0),)
    codings = gate_up.coding, down.coding
    return all(one.rounds and (one.height, one.width) in forms for one in codings)


def multiply_many(
    x: Tensor,
    chosen: int,
    pairs: SortedPairs,
    gate_up: ExpertMatrix | ExpertCodes,
    down: ExpertMatrix | ExpertCodes,
    activation: Activation,
) -> Tensor:
    """Return the results of all pairs, [T * k, D], of x [T, D].

    pairs: in tiles of `PAIRS`. activation: `gelu`, alpha and limit of a clamp. Where matrices are
    in e4m3, so are x and the inner values, each 128 of them with a scale.
    """
    num_pairs, rows = len(x) * chosen, len(pairs.experts) * PAIRS
    inner_width, width = gate_up.num_rows // 2, down.num_rows
    given, inner = _Values(x), _Values(x.new_empty(rows, inner_width))
    if isinstance(gate_up, ExpertCodes):
        given = _Values(*quantize_rows(x, "fp8", grouped=True))
        blocks = cdiv(inner_width, STEP)
        inner = _Values(
            given.rows.new_empty(rows, blocks * STEP),
            x.new_empty(rows, blocks, dtype=torch.float32),
        )
    results = x.new_empty(num_pairs, width)
    form = functools.partial(_form, x.dtype, chosen=chosen)
    gated = form(gate_up, gated=True, activation=activation)
    _launch(gated, given, gate_up, pairs, inner, inner_width, num_pairs)
    _launch(form(down), inner, down, pairs, _Values(results), width, num_pairs)
    return results


def _form(
    dtype: torch.dtype,
    matrix: ExpertMatrix | ExpertCodes,
    *,
    chosen: int,
    gated: bool = False,
    activation: Activation = (False, None, None),
) -> Form:
    eight = isinstance(matrix, ExpertCodes)
    row_scales = isinstance(matrix, ExpertCodes) and matrix.coding.width == 0
    return Form(dtype, eight, row_scales, matrix.bias is not None, chosen, gated, activation)


def _launch(
    form: Form,
    x: _Values,
    matrix: ExpertMatrix | ExpertCodes,
    pairs: SortedPairs,
    out: _Values,
    outputs: int,
    num_pairs: int,
) -> None:
    """Launch a product of all tiles."""
    kernel = _KERNELS.to_launch(form, out.rows)
    if kernel is None:
        return
    numbers = x.rows.shape[1]
    weight = memory_of(matrix).view(x.rows.dtype)
    w_tiles = tile_map(weight.view(-1, numbers), _COLUMNS // 2, _STEP_BYTES)
    x_tiles = w_tiles if form.gated else tile_map(x.rows, PAIRS, _STEP_BYTES)
    parts = cdiv(outputs, _COLUMNS // (1 + form.gated))
    clusters = min(cdiv(len(pairs.experts), 2) * parts, num_processors(out.rows.device) // 2)
    w_scales = matrix.scales if isinstance(matrix, ExpertCodes) else None
    kernel.launch(
        2 * clusters,
        [
            x_tiles,
            w_tiles,
            _address(x.rows),
            _Scales(*(_address(one) for one in (x.scales, w_scales, out.scales))),
            _address(matrix.bias),
            *map(_address, (pairs.order, pairs.experts, pairs.used)),
            _address(out.rows),
            _Sizes(num_pairs, numbers * x.rows.itemsize, outputs, parts),
        ],
    )


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
