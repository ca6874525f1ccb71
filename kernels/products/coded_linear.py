"""x W^T + b on a GPU where W is in 8 or 4 bits, with the operations around it in a layer.

W stays in its codes, for all numbers of rows. Up to MAX_ROWS rows, where reading W is most of the
work, a row's bits do not depend on the number of rows: the tile of W and the number of programs
that share it follow from W's size alone, and the next norm is always begun.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.gpu import gpu_of
from sidestep.kernels.launch import num_processors
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream, normed
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.own_linear import add_own_linear, own_linear
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

MAX_ROWS = 64
_BLOCK_N = 64
"""Rows of W of a program: the number that Hopper's tensor cores take at once."""
_LEAST_ROWS = 16
"""Least number of rows of x of a program; fewer are filled up."""
_MOST_SPLIT = 8


def choose(tokens: int, matrix: DeviceMatrix, gated: bool) -> CodedConfig:
    """Return the configuration for this number of rows of x."""
    gpu = gpu_of(matrix.device)
    large = gpu is not None and gpu.capability >= 90 and matrix.dtype != torch.float32
    if tokens > MAX_ROWS:
        if large:
            return CodedConfig(128, 64 if gated else 128, num_warps=8, num_stages=3)
        return CodedConfig(_BLOCK_N, 32 if gated else 64, num_stages=2)
    outputs, inputs = matrix.shape[0] // (1 + gated), matrix.shape[1]
    # Without Hopper's tensor cores, a thread has too few registers for two tiles of 64 rows.
    most = MAX_ROWS if large or not gated else MAX_ROWS // 2
    rows = min(most, max(_LEAST_ROWS, 1 << (tokens - 1).bit_length()))
    stage = (
        _BLOCK_N * (1 + gated) * STEP * 4 // matrix.in_word + rows * STEP * matrix.dtype.itemsize
    )
    # Two or more programs share a processor's memory; older GPUs have less of it.
    stages = max(2, min(6, (80 if large else 44) * 1024 // stage))
    split = split_of(outputs, inputs, num_processors(matrix.device))
    return CodedConfig(_BLOCK_N, rows, split, num_stages=stages)


def split_of(outputs: int, inputs: int, processors: int) -> int:
    """Return the number of programs that share a tile of W: enough for two a processor."""
    tiles, steps = -(-outputs // _BLOCK_N), -(-inputs // STEP)
    split = 1
    while split < _MOST_SPLIT and 2 * split * tiles <= 2 * processors and 4 * split <= steps:
        split *= 2
    return split


def _in_8_bits(
    x: Tensor | Stream,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None,
    *,
    gated: bool = False,
    add: bool = False,
) -> Tensor | None:
    """Return the product with x rounded to 8 bits, or None where x is not rounded.

    It is rounded if the matrix was made for that, for rows enough that the tensor cores' speed
    counts, and on GPUs whose tensor cores take such numbers.
    """
    hidden = x.hidden if isinstance(x, Stream) else x
    gpu = gpu_of(hidden.device)
    if len(hidden) <= MAX_ROWS or gpu is None or matrix.rounded is None:
        return None
    from sidestep.kernels.quantized.quantize_rows_triton import quantize_rows
    from sidestep.kernels.quantized.scaled_product_triton import rounds_inputs, scaled_product

    if not rounds_inputs(matrix, gpu.capability):
        return None
    grouped = matrix.group[1] != 0
    rows = quantize_rows(x, matrix.rounded, grouped=grouped, input_scale=matrix.input_scale)
    if out is None:
        out = hidden.new_empty(len(hidden), matrix.shape[0] // (1 + gated))
    return scaled_product(rows, matrix, bias, out, gated=gated, add=add)


def coded_linear(
    x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b, [T, N], which is `out` if that is given.

    x is [T, K], or a stream whose norm is multiplied; b is [N].
    """
    return _product(x, matrix, bias, gated=False, out=out)


def coded_gated_linear(x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up, [T, F], of x W^T + b = [gate | up] with W [2 F, K]."""
    return _product(x, matrix, bias, gated=True)


def _product(
    x: Tensor | Stream,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    *,
    gated: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return the product, with the activation if gated."""
    rounded = _in_8_bits(x, matrix, bias, out, gated=gated)
    if rounded is not None:
        return rounded
    tokens = len(x.hidden if isinstance(x, Stream) else x)
    given = x if tokens <= MAX_ROWS else normed(x)
    config = choose(tokens, matrix, gated)
    return own_linear(given, matrix, bias, gated=gated, config=config, out=out)


def add_coded_linear(
    residual: Tensor,
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    norm: RmsNorm | None = None,
) -> BegunNorm | None:
    """Add x W^T + b to residual [T, N], in place.

    norm: the norm that the sum goes through next. Return the part of it that was computed on the
    way, or None. A norm is not begun in float16: a stream that is not scaled yet may be too large
    for it.
    """
    if _in_8_bits(x, matrix, bias, residual, add=True) is not None:
        return None
    few = len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
    config = choose(len(x), matrix, False)
    return add_own_linear(residual, x, matrix, bias, norm=norm if few else None, config=config)
