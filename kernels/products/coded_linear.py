"""x W^T + b on a GPU where W is in 8 or 4 bits, with the operations around it in a layer.

W stays in its codes. Up to MAX_ROWS rows, where reading W is most of the work, a row's bits do not
depend on the number of rows: the number of programs that share a tile of W follows from W's size
alone, the height of a tile changes no bits, and the next norm is always begun.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from sidestep.kernels.gpu import gpu_of, is_hopper
from sidestep.kernels.launch import free_processors, num_processors
from sidestep.kernels.ops.rms_norm import Begun, DoneProduct, QuantizedRows, RmsNorm, Stream, normed
from sidestep.kernels.ops.silu_mul import GateAndUp, computed, silu_mul
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.linear import gated_linear, unfinished_linear
from sidestep.kernels.products.own_linear import add_own_linear, own_linear
from sidestep.kernels.products.partial_sums import MOST_PARTIALS
from sidestep.kernels.products.scaled_config import ScaledConfig, scaled_config
from sidestep.kernels.products.streamed_config import (
    ALIGNED,
    OneRowConfig,
    StreamedConfig,
    WideConfig,
    padded,
)
from sidestep.kernels.quantized import clustered_codes
from sidestep.kernels.quantized.coded_matrix import ROUNDED
from sidestep.kernels.quantized.decode_matrix_triton import decode_matrix
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.quantized.quantize_rows_triton import quantize_rows
from sidestep.kernels.quantized.scaled_library import (
    scaled_by_library,
    suits_library,
    unscaled_by_library,
)
from sidestep.kernels.quantized.scaled_product_triton import rounds_inputs, scaled_product
from sidestep.kernels.unfinished_product import Product, UnscaledProduct, without_scales

MAX_ROWS = 64
_DECODED = 1024
"""Rows from which on W is decoded as a whole, for the library's product. To decode a matrix takes
about as long as to multiply 250 rows."""
_DECODED_BESIDE = 4097
"""The same where clusters of processors would multiply codes, for a product without activation."""
_BLOCK_N = 64
"""Rows of W of a program: the number that Hopper's tensor cores take at once."""
_LEAST_ROWS = 16
"""Least number of rows of x of a program; fewer are filled up."""
_MOST_FUSED = 32
"""Rows up to which a product ends in the activation: for more, a thread has too few registers."""
_TALL = range(1536, (16 << 10) + 1)
"""Columns of a program that has two tiles of W, for more rows than that: each reads x from L2, as
slowly as the codes come. Scales of more columns do not fit."""
_MOST_UNSCALED, _SMALL = 2048, 32 << 20
"""Rows up to which the library is faster without scales, which the next kernel then applies, and
numbers of a matrix up to which it is so for any number of rows."""
_LIKE_256 = range(161, 193)
"""Rows that take the library as long as 256 do, where W is wide: our own kernel takes less."""
_MOST_SPLIT = 8
_SHARE, _MOST_STAGES = 55 << 10, 10
"""Shared memory of a program on Hopper, so that four share a processor, or two if they are gated,
and the tiles in its ring."""
_ONE_ROW_BYTES = 113 << 10
"""Shared memory of a program of the kernel for one row, so that two share a processor."""
_MOST_OF_ONE_ROW, _SHORT = 26 << 20, 12 << 20
"""Numbers of a matrix up to which one row's product has a kernel of its own. A larger one is faster
with a ring, since shared memory holds no more of it. The product of a short one has twice as many
parts, which several rows have too."""
_LEAST_STEPS = {256: 3, 128: 7}
"""Columns of a step, of codes of 4 and 8 bits -> the least number of steps of a program, where
several share a tile."""


_WIDE = (
    # More programs than one have room on a processor if they have four warps.
    (WideConfig(128, 128, 2, num_warps=4), 2, 1.5, 3.0),
    (WideConfig(128, 128, 2, step=256), 1, 0.82, 3.0),
    (WideConfig(128, 256, 3), 1, 1.38, 6.0),
    (WideConfig(128, 128, 2, step=256, more=64), 1, 1.01, 4.3),
    (WideConfig(128, 64, 3, more=32), 2, 1.38, 2.5),
    (WideConfig(128, 64, 3, step=256, more=32), 1, 0.775, 1.5),
)
"""Tiles of many rows, the programs of a processor, and microseconds: of steps of 128 columns of all
of these programs, and of a program's beginning and end."""
_WIDE_RING = 200 << 10
"""Shared memory for the rings of a processor."""
_MOST_SHARING, _SHARING_US = 4, 5.0
"""Programs that share a tile of these at most, and the time that they need for it."""


def choose(
    tokens: int, matrix: DeviceMatrix, gated: bool
) -> CodedConfig | StreamedConfig | OneRowConfig:
    """Return the configuration for this number of rows of x."""
    gpu = gpu_of(matrix.device)
    large = gpu is not None and gpu.capability >= 90 and matrix.dtype != torch.float32
    if tokens > MAX_ROWS:
        if large:
            return CodedConfig(128, 128, num_warps=8, num_stages=3)
        return CodedConfig(_BLOCK_N, 32 if gated else 64, num_stages=2)
    outputs, inputs = matrix.shape[0] // (1 + gated), matrix.shape[1]
    processors = num_processors(matrix.device)
    if streams(matrix):
        config = _streamed_config(tokens, matrix, gated, outputs, processors)
        one_row = OneRowConfig(config.split)
        if tokens == 1 and _has_kernel_of_its_own(matrix, gated, one_row):
            return one_row
        return config
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


def _has_kernel_of_its_own(matrix: DeviceMatrix, gated: bool, config: OneRowConfig) -> bool:
    """Return whether one row's product has all codes of a program in shared memory at once."""
    words = 4 * -(-matrix.shape[1] // matrix.in_word)
    held = config.block_n * words + matrix.shape[1] * matrix.dtype.itemsize
    return _in_one_row(matrix, gated, _MOST_OF_ONE_ROW) and held <= _ONE_ROW_BYTES


def _in_one_row(matrix: DeviceMatrix, gated: bool, most: int) -> bool:
    """Return whether a matrix has the form for that kernel, and no more numbers than this."""
    small = matrix.shape[0] * matrix.shape[1] <= most
    return small and not gated and matrix.kind in ("fp8", "int8", "int4")


def _streamed_config(
    tokens: int, matrix: DeviceMatrix, gated: bool, outputs: int, processors: int
) -> StreamedConfig:
    """Return the configuration of the kernel for Hopper.

    A program's ring fills its share of a processor's memory. If it were smaller, more programs
    would fit than there should be: those of a kernel that is launched early would all crowd on the
    processors that the kernel before leaves free.
    """
    inputs, width = matrix.shape[1], 32 * matrix.in_word
    # The kernel for one row has the same parts.
    least = -(-_LEAST_STEPS[width] // (2 if _in_one_row(matrix, gated, _SHORT) else 1))
    split = split_of(outputs * (1 + gated), inputs, 4 * processors, width, least)
    # The split follows from W's size alone, but a program of many rows does not have the pair.
    few, tall = tokens <= _MOST_FUSED, inputs // split in _TALL
    tiles = 1 + (gated if few else tall)
    stage = _BLOCK_N * tiles * 128 + padded(tokens) * width * matrix.dtype.itemsize
    room = _SHARE * tiles - _BLOCK_N * tiles * scale_bytes(inputs, split, matrix)
    block_n = _BLOCK_N if few else _BLOCK_N * tiles
    return StreamedConfig(width, max(2, min(_MOST_STAGES, room // stage)), split, block_n)


def wide_config(tokens: int, matrix: DeviceMatrix) -> WideConfig:
    """Return the configuration of the kernel for Hopper and more than MAX_ROWS rows.

    It is the one with the least time by a rule: each turn of all processors takes a program's
    steps.
    """
    (outputs, inputs), processors = matrix.shape, free_processors(matrix.device)
    steps, best, least = -(-inputs // STEP), None, 0.0
    for given, each, step_us, ends_us in _WIDE:
        rows = given.rows + given.more
        tiles = -(-outputs // given.block_n) * -(-tokens // rows)
        sums = given.block_n * rows
        for split in range(1, _MOST_SHARING + 1):
            programs = tiles * split
            if split > 1 and (programs > processors or programs * sums > MOST_PARTIALS):
                break
            turns = -(-programs // (processors * each))
            took = turns * -(-steps // split) * step_us + ends_us + _SHARING_US * (split > 1)
            if best is None or took < least:
                best, least = (replace(given, split=split), each), took
    assert best is not None
    config, each = best
    if matrix.in_word == 8:
        return config
    # Codes of 8 bits take twice the memory.
    tile = config.block_n * STEP + (config.rows + config.more) * STEP * 2
    return replace(config, step=STEP, stages=_WIDE_RING // each // tile)


def streams(matrix: DeviceMatrix) -> bool:
    """Return whether the kernel for Hopper takes the matrix: it scales rows, or whole tiles."""
    simple = matrix.minimums is None and matrix.group[1] % STEP == 0
    aligned = matrix.shape[1] % ALIGNED == 0 and matrix.dtype != torch.float32
    return simple and aligned and is_hopper(matrix.device)


def scale_bytes(inputs: int, split: int, matrix: DeviceMatrix) -> int:
    """Return the bytes of scales that a program of the kernel for Hopper keeps of a row of W."""
    if matrix.group[1] == 0:
        return 0
    width = 32 * matrix.in_word
    steps = -(-inputs // (width * split)) * (width // STEP)
    return 4 * (1 << (steps - 1).bit_length())


def split_of(outputs: int, inputs: int, programs: int, width: int = STEP, least: int = 2) -> int:
    """Return the number of programs that share a tile of W, each with some of the columns.

    programs: the most that there should be in all. width: columns of a step. least: the fewest
    steps of a program.
    """
    tiles, steps = -(-outputs // _BLOCK_N), -(-inputs // width)
    split = 1
    while split < _MOST_SPLIT and 2 * split * tiles <= programs and 2 * least * split <= steps:
        if (2 * split - 1) * -(-steps // (2 * split)) >= steps:
            break  # the last one would have none
        split *= 2
    return split


def _rounds(tokens: int, matrix: DeviceMatrix) -> bool:
    """Return whether this number of rows is rounded to 8 bits.

    They are if the matrix was made for that, for rows enough that the tensor cores' speed counts,
    and on GPUs whose tensor cores take such numbers.
    """
    gpu = gpu_of(matrix.device)
    return tokens > MAX_ROWS and gpu is not None and rounds_inputs(matrix, gpu.capability)


def _rounded(x: Tensor | Stream | GateAndUp, matrix: DeviceMatrix) -> QuantizedRows | None:
    """Return x rounded to 8 bits, or None where it is not rounded."""
    if not _rounds(_rows_of(x), matrix):
        return None
    assert matrix.rounded is not None
    grouped = matrix.group[1] != 0
    if isinstance(x, Stream) and isinstance(x.begun, QuantizedRows):
        codes, scales = x.begun
        groups = -(-matrix.shape[1] // STEP) if grouped else 1
        same = codes.dtype == ROUNDED[matrix.rounded] and scales.shape[1] == groups
        if same and matrix.input_scale is None:
            return x.begun
    return quantize_rows(x, matrix.rounded, grouped=grouped, input_scale=matrix.input_scale)


def _rows_of(x: Tensor | Stream | GateAndUp) -> int:
    """Return the number of rows."""
    if isinstance(x, GateAndUp):
        return len(without_scales(x.both))
    return len(x.hidden if isinstance(x, Stream) else x)


def _scaled(
    rounded: QuantizedRows,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None = None,
    *,
    add: bool = False,
    parts: bool = False,
) -> Tensor:
    """Return the product of rows in 8 bits with scales a row, or add it to out [T, N].

    Our own kernel computes it where it is faster than the library's. parts: whether parts of the
    product may be returned, float32 [P, T, N], which the caller adds.
    """
    tokens, outputs = len(rounded.codes), matrix.shape[0]
    config = _own_tiles(tokens, matrix, leaving=parts and bias is None)
    if config is None:
        if out is None or not add:
            return scaled_by_library(rounded, matrix, bias, out)
        return out.add_(scaled_by_library(rounded, matrix, bias))
    from sidestep.kernels.products.scaled_wide_gluon import launch

    if out is None and parts and config.split > 1 and bias is None:
        out = rounded.scales.new_empty(config.split, tokens, outputs)
    elif out is None:
        out = rounded.scales.new_empty(tokens, outputs, dtype=matrix.dtype)
    launch(rounded, matrix, bias, out, add, config)
    return out


def _unscaled(
    rounded: QuantizedRows | None, matrix: DeviceMatrix, bias: Tensor | None
) -> UnscaledProduct | None:
    """Return the library's product without scales, or None where that does not suit.

    For these rows it is faster so than with scales, and than our own kernel.
    """
    if rounded is None or bias is not None or not suits_library(matrix):
        return None
    rows, columns = len(rounded.codes), matrix.scales
    few = rows <= _MOST_UNSCALED or matrix.shape[0] * matrix.shape[1] <= _SMALL
    simple = matrix.dtype == torch.bfloat16 and matrix.group[0] == 1
    if not (few and simple and is_hopper(matrix.device)):
        return None
    return UnscaledProduct(unscaled_by_library(rounded, matrix), rounded.scales, columns)


def _own_tiles(tokens: int, matrix: DeviceMatrix, *, leaving: bool) -> ScaledConfig | None:
    """Return the tiles of our own kernel for rows in 8 bits, or None for the library's."""
    if not is_hopper(matrix.device):
        return None
    processors = num_processors(matrix.device)
    return scaled_config(tokens, *matrix.shape, processors, leaving=leaving)


def _whole(
    x: Tensor | Stream,
    rounded: QuantizedRows | None,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the product of rows with scales a row, or of many rows by the library, else None.

    out: memory for it. For many rows, the library multiplies the decoded matrix.
    """
    if rounded is not None:
        return _scaled(rounded, matrix, bias, out) if suits_library(matrix) else None
    if not _decodes(_rows_of(x), matrix):
        return None
    found = linear(normed(x), _decoded(matrix), bias)
    return found if out is None else out.copy_(found)


def _decodes(rows: int, matrix: DeviceMatrix) -> bool:
    """Return whether W is decoded as a whole for this number of rows, which are not rounded."""
    return rows >= (_DECODED_BESIDE if by_clusters(matrix) else _DECODED)


def by_clusters(matrix: DeviceMatrix) -> bool:
    """Return whether clusters of processors multiply many rows that are not rounded.

    They, and the kernel that adds to the stream then, take as many processors as they are given.
    """
    return streams(matrix) and clustered_codes.takes(matrix)


def _decoded(matrix: DeviceMatrix) -> Tensor:
    """Return the matrix's numbers, in new memory."""
    if not streams(matrix):
        return decode_matrix(matrix)
    from sidestep.kernels.quantized.decode_words_gluon import decode_words

    return decode_words(matrix)


def coded_linear(
    x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Return x W^T + b, [T, N], which is `out` if that is given.

    x is [T, K], or a stream whose norm is multiplied; b is [N].
    """
    return _linear(x, _rounded(x, matrix), matrix, bias, out)


def unfinished_coded_linear(
    x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None
) -> Product:
    """Return x W^T + b, [T, N], or what is left of it to the kernel that reads it next."""
    rounded = _rounded(x, matrix)
    found = _unscaled(rounded, matrix, bias)
    if found is not None:
        return found
    if rounded is None and _decodes(_rows_of(x), matrix):
        return unfinished_linear(x, _decoded(matrix), bias)
    return _linear(x, rounded, matrix, bias)


def _linear(
    x: Tensor | Stream,
    rounded: QuantizedRows | None,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    done = x.begun if isinstance(x, Stream) else None
    if isinstance(done, DoneProduct) and done.codes is matrix.words and bias is None:
        return done.product if out is None else out.copy_(done.product)
    found = _whole(x, rounded, matrix, bias, out)
    return found if found is not None else _own(x, rounded, matrix, bias, gated=False, out=out)


def coded_gated_linear(
    x: Tensor | Stream, matrix: DeviceMatrix, bias: Tensor | None
) -> Tensor | GateAndUp:
    """Return silu(gate) * up, [T, F], of x W^T + b = [gate | up] with W [2 F, K].

    Where inputs are rounded, the activation is left to the kernel that rounds it for the next
    product.
    """
    rounded = _rounded(x, matrix)
    unscaled = None if _rows_of(x) in _LIKE_256 else _unscaled(rounded, matrix, bias)
    if unscaled is not None:
        return GateAndUp(unscaled)
    if rounded is None and _rows_of(x) > MAX_ROWS and by_clusters(matrix):
        return clustered_codes.multiply(normed(x), matrix, bias, gated=True)
    if rounded is None and _rows_of(x) >= _DECODED:
        return gated_linear(x, _decoded(matrix), bias)
    found = _whole(x, rounded, matrix, bias)
    if found is not None:
        return GateAndUp(found)
    fused = rounded is not None or _rows_of(x) <= _MOST_FUSED
    found = _own(x, rounded, matrix, bias, gated=fused, halves=True)
    return found if fused else silu_mul(found)


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
    if len(hidden) > MAX_ROWS and streams(matrix):
        if out is None:
            out = hidden.new_empty(len(hidden), matrix.shape[0])
        _wide(normed(x), matrix, bias, out, add=False)
        return out
    given = x if len(hidden) <= MAX_ROWS else normed(x)
    config = choose(len(hidden), matrix, halves)
    return own_linear(given, matrix, bias, gated=gated, config=config, out=out)


def _wide(x: Tensor, matrix: DeviceMatrix, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
    """Write the product to out by the kernel for Hopper and many rows, or add it."""
    if not add and clustered_codes.takes(matrix):
        clustered_codes.launch(x, matrix, bias, out)
        return
    from sidestep.kernels.products.wide_codes_gluon import launch

    launch(x, matrix, bias, out, add, wide_config(len(x), matrix))


def add_coded_linear(
    residual: Tensor,
    x: Tensor | GateAndUp,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    norm: RmsNorm | None = None,
) -> Begun | None:
    """Add x W^T + b to residual [T, N], in place.

    norm: the norm that the sum goes through next. Return the part of it that was computed on the
    way, or its rounded result, or None. A norm is not begun in float16: a stream that is not scaled
    yet may be too large for it.
    """
    rounded = _rounded(x, matrix)
    if rounded is not None:
        return _add_rounded(residual, rounded, matrix, bias, norm)
    x = computed(x)
    if len(x) >= _DECODED:
        if bias is not None:
            residual += bias
        residual.addmm_(x, _decoded(matrix).t())
        return None
    if len(x) > MAX_ROWS and streams(matrix):
        _wide(x, matrix, bias, residual, add=True)
        return None
    few = len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
    config = choose(len(x), matrix, False)
    return add_own_linear(residual, x, matrix, bias, norm=norm if few else None, config=config)


def _add_rounded(
    residual: Tensor,
    rounded: QuantizedRows,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    norm: RmsNorm | None,
) -> Begun | None:
    """Add the product of rows in 8 bits to residual, as add_coded_linear does."""
    if not suits_library(matrix):
        scaled_product(rounded, matrix, bias, residual, add=True)
        return None
    if norm is None or matrix.input_scale is not None:
        _scaled(rounded, matrix, bias, residual, add=True)
        return None
    assert matrix.rounded is not None
    added: Tensor | UnscaledProduct | None = _unscaled(rounded, matrix, bias)
    if added is None:
        added = _scaled(rounded, matrix, bias, parts=True)
    # The next matrix is most likely of this form.
    return quantize_rows(Stream(residual, norm), matrix.rounded, grouped=False, added=added)
