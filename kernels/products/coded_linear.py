"""x W^T + b on a GPU where W is in 8 or 4 bits, with the operations around it in a layer.

W stays in its codes. Up to MAX_ROWS rows, where reading W is most of the
work, a row's bits do not depend on the number of rows: the tile of W and the number of programs
that share it follow from W's size alone, and the next norm is always begun.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from sidestep.kernels.gpu import gpu_of
from sidestep.kernels.launch import num_processors
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream, normed
from sidestep.kernels.ops.silu_mul import silu_mul
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.own_linear import add_own_linear, is_hopper, own_linear
from sidestep.kernels.products.streamed_config import ALIGNED, StreamedConfig, padded
from sidestep.kernels.quantized.decode_matrix_triton import decode_matrix
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.quantized.quantize_rows_triton import QuantizedRows, quantize_rows
from sidestep.kernels.quantized.scaled_library import scaled_by_library, suits_library
from sidestep.kernels.quantized.scaled_product_triton import rounds_inputs, scaled_product

MAX_ROWS = 64
_DECODED = 1024
"""Rows from which on W is decoded as a whole, for the library's product. To decode a matrix takes
about as long as to multiply 250 rows."""
_BLOCK_N = 64
"""Rows of W of a program: the number that Hopper's tensor cores take at once."""
_LEAST_ROWS = 16
"""Least number of rows of x of a program; fewer are filled up."""
_MOST_FUSED = 32
"""Rows up to which a product ends in the activation: for more, a thread has too few registers."""
_MOST_SPLIT = 8
_SHARE, _MOST_STAGES = 110 << 10, 10
"""Shared memory of a program on Hopper, so that two share a processor, and the tiles in its ring.
Codes of 4 bits take longer to decode than to load, so twice as many programs share a processor."""


def choose(tokens: int, matrix: DeviceMatrix, gated: bool) -> CodedConfig | StreamedConfig:
    """Return the configuration for this number of rows of x."""
    gpu = gpu_of(matrix.device)
    large = gpu is not None and gpu.capability >= 90 and matrix.dtype != torch.float32
    if tokens > MAX_ROWS:
        if large:
            return CodedConfig(128, 128, num_warps=8, num_stages=3)
        return CodedConfig(_BLOCK_N, 32 if gated else 64, num_stages=2)
    outputs, inputs = matrix.shape[0] // (1 + gated), matrix.shape[1]
    processors = num_processors(matrix.device)
    if _streams(matrix):
        return _streamed_config(tokens, matrix, gated, outputs, processors)
    split = split_of(outputs, inputs, 2 * processors)
    # Without Hopper's tensor cores, a thread has too few registers for two tiles of 64 rows.
    most = MAX_ROWS if large or not gated else MAX_ROWS // 2
    rows = min(most, max(_LEAST_ROWS, 1 << (tokens - 1).bit_length()))
    stage = (
        _BLOCK_N * (1 + gated) * STEP * 4 // matrix.in_word + rows * STEP * matrix.dtype.itemsize
    )
    # Two or more programs share a processor's memory; older GPUs have less of it.
    stages = max(2, min(6, (80 if large else 44) * 1024 // stage))
    return CodedConfig(_BLOCK_N, rows, split, num_stages=stages)


def _streamed_config(
    tokens: int, matrix: DeviceMatrix, gated: bool, outputs: int, processors: int
) -> StreamedConfig:
    """Return the configuration of the kernel for Hopper.

    A program's ring fills its share of a processor's memory. If it were smaller, more programs
    would fit than there should be: those of a kernel that is launched early would all crowd on the
    processors that the kernel before leaves free.
    """
    inputs, share = matrix.shape[1], _SHARE if matrix.in_word < 8 else _SHARE // 2
    turns = 2 if matrix.in_word < 8 else 4
    split = split_of(outputs, inputs, turns * processors)
    rows, code_bytes = padded(tokens), STEP * 4 // matrix.in_word
    stage = _BLOCK_N * (1 + gated) * code_bytes + rows * STEP * matrix.dtype.itemsize
    room = share - _BLOCK_N * (1 + gated) * scale_bytes(inputs, split, matrix)
    return StreamedConfig(STEP, max(3, min(_MOST_STAGES, room // stage)), split)


def _streams(matrix: DeviceMatrix) -> bool:
    """Return whether the kernel for Hopper takes the matrix: it scales rows, or whole tiles."""
    simple = matrix.minimums is None and matrix.group[1] % STEP == 0
    aligned = matrix.shape[1] % ALIGNED == 0 and matrix.dtype != torch.float32
    return simple and aligned and is_hopper(matrix.device)


def scale_bytes(inputs: int, split: int, matrix: DeviceMatrix) -> int:
    """Return the bytes of scales that a program of the kernel for Hopper keeps of a row of W."""
    if matrix.group[1] == 0:
        return 0
    steps = -(-inputs // (STEP * split))
    return 4 * (1 << (steps - 1).bit_length())


def split_of(outputs: int, inputs: int, programs: int) -> int:
    """Return the number of programs that share a tile of W, each with some of the columns.

    programs: the most that there should be in all.
    """
    tiles, steps = -(-outputs // _BLOCK_N), -(-inputs // STEP)
    split = 1
    while split < _MOST_SPLIT and 2 * split * tiles <= programs and 4 * split <= steps:
        if (2 * split - 1) * -(-steps // (2 * split)) >= steps:
            break  # the last one would have none
        split *= 2
    return split


def _rounded(x: Tensor | Stream, matrix: DeviceMatrix) -> QuantizedRows | None:
    """Return x rounded to 8 bits, or None where it is not rounded.

    It is rounded if the matrix was made for that, for rows enough that the tensor cores' speed
    counts, and on GPUs whose tensor cores take such numbers.
    """
    hidden = x.hidden if isinstance(x, Stream) else x
    gpu = gpu_of(hidden.device)
    if len(hidden) <= MAX_ROWS or gpu is None or not rounds_inputs(matrix, gpu.capability):
        return None
    assert matrix.rounded is not None
    grouped = matrix.group[1] != 0
    return quantize_rows(x, matrix.rounded, grouped=grouped, input_scale=matrix.input_scale)


def _by_library(
    x: Tensor | Stream, rounded: QuantizedRows | None, matrix: DeviceMatrix, bias: Tensor | None
) -> Tensor | None:
    """Return the product as the library computes it, or None where our own kernels are faster.

    The library multiplies in 8 bits what is rounded to them. For many rows it multiplies the
    decoded matrix.
    """
    if rounded is not None:
        return scaled_by_library(rounded, matrix, bias) if suits_library(matrix) else None
    if len(x.hidden if isinstance(x, Stream) else x) < _DECODED:
        return None
    return linear(normed(x), decode_matrix(matrix), bias)


def coded_linear(
    x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b, [T, N], which is `out` if that is given.

    x is [T, K], or a stream whose norm is multiplied; b is [N].
    """
    rounded = _rounded(x, matrix)
    found = _by_library(x, rounded, matrix, bias)
    if found is not None:
        return found if out is None else out.copy_(found)
    return _own(x, rounded, matrix, bias, gated=False, out=out)


def coded_gated_linear(x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up, [T, F], of x W^T + b = [gate | up] with W [2 F, K]."""
    rounded = _rounded(x, matrix)
    found = _by_library(x, rounded, matrix, bias)
    if found is None:
        tokens = len(x.hidden if isinstance(x, Stream) else x)
        fused = rounded is not None or tokens <= _MOST_FUSED
        found = _own(x, rounded, matrix, bias, gated=fused, halves=True)
        if fused:
            return found
    return silu_mul(found)


def _own(
    x: Tensor | Stream,
    rounded: QuantizedRows | None,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    *,
    gated: bool,
    halves: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the product by our own kernels, with the activation if gated.

    halves: whether the matrix is a gate's over another, and is split as for gated products, so that
    sums have the same order with and without the activation.
    """
    hidden = x.hidden if isinstance(x, Stream) else x
    if rounded is not None:
        if out is None:
            out = hidden.new_empty(len(hidden), matrix.shape[0] // (1 + gated))
        return scaled_product(rounded, matrix, bias, out, gated=gated)
    given = x if len(hidden) <= MAX_ROWS else normed(x)
    config = choose(len(hidden), matrix, halves)
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
    rounded = _rounded(x, matrix)
    found = _by_library(x, rounded, matrix, bias)
    if found is not None:
        residual += found
        return None
    if rounded is not None:
        scaled_product(rounded, matrix, bias, residual, add=True)
        return None
    few = len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
    config = choose(len(x), matrix, False)
    return add_own_linear(residual, x, matrix, bias, norm=norm if few else None, config=config)
