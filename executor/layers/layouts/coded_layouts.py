"""Layouts of quantized matrices, for operators of torch that multiply without decoding them first.

All operators here multiply in floating point: no input is quantized. They are private to torch, so
that each may be missing; a layout is None then, and where its operator has no fast kernel for the
CPU or the matrix's form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestep.executor.layers.layouts.layout import LaidOut, OpaqueWeight, operator
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix

_FAST = ("AVX2", "AVX512")
"""Instructions for which torch has kernels of int8 and int4. On other CPUs it has loops of single
numbers, which are slower than the product of decoded numbers."""
_GROUPS = (256, 128, 64, 32)
"""Sizes of groups that the int4 operator takes."""
_INT4_ROWS = 16
"""The int4 operator takes multiples of this number of outputs."""
_PACKED_AT_ONCE = 4096
"""Outputs that are packed at a time, so that codes in four bytes take little memory. A multiple of
the kernels' blocks, which are packed one by one."""
_INT8_COLUMNS = 16
"""The int8 operator reads this number of inputs at a time."""
_ALIGNED = 64
"""Bytes. The int8 operator reads whole vectors, from addresses that are multiples of their size."""
_HALF_COLUMNS, _HALF_ROWS = 512, 16
"""Matrices in float16 are padded to multiples of these numbers of inputs and outputs."""
_HALF_EXPONENT = 11
"""Rows in float16 are scaled so that their largest number is just below 2 ** 11: then the smallest
that is rounded as finely as the largest is 2 ** 24 times smaller."""


def int4(matrix: CodedMatrix) -> LaidOut | None:
    """Keep 4-bit codes, for bfloat16 inputs.

    Scales and zeros are rounded to bfloat16, which is as fine as rounding decoded numbers.
    """
    pack, multiply = (
        operator("aten", name)
        for name in ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    )
    size = _group(matrix) if matrix.kind == "int4" and _is_fast_for(matrix) else None
    if pack is None or multiply is None or size is None:
        return None
    rows, columns = matrix.shape
    missing = -columns % size
    packed = _packed(matrix, missing, pack)
    factors = _scales_and_zeros(matrix, size, len(packed))

    def product(x: Tensor) -> Tensor:
        x = pad(x, (0, missing)) if missing else x.contiguous()
        made: Tensor = multiply(x, packed, size, factors)
        return made if len(packed) == rows else made[:, :rows].contiguous()

    return product, (packed, factors)


def int8(matrix: CodedMatrix) -> LaidOut | None:
    """Keep 8-bit codes with a scale a row, for bfloat16 inputs.

    Scales are rounded to bfloat16, which is as fine as rounding decoded numbers.
    """
    multiply = operator("aten", "_weight_int8pack_mm")
    one_scale = matrix.kind == "int8" and _scale_a_row(matrix)
    if multiply is None or not one_scale or not _is_fast_for(matrix):
        return None
    missing = -matrix.shape[1] % _INT8_COLUMNS
    codes = _aligned(pad(matrix.codes, (0, missing)) if missing else matrix.codes)
    scales = matrix.with_row_scales().scales[:, 0].to(matrix.dtype)

    def product(x: Tensor) -> Tensor:
        made: Tensor = multiply(_aligned(pad(x, (0, missing)) if missing else x), codes, scales)
        return made

    return product, (codes, scales)


def float16(matrix: CodedMatrix) -> LaidOut | None:
    """Keep numbers in float16, multiplied with float32 inputs.

    A row is scaled, so that all its numbers are in float16's range. Codes of integers with one
    scale a row are kept exactly; others are rounded to 11 bits.
    """
    pack, multiply = (
        operator("quantized", name) for name in ("linear_prepack_fp16", "linear_dynamic_fp16")
    )
    rows, columns = matrix.shape
    nbytes = 2 * (rows + -rows % _HALF_ROWS) * (columns + -columns % _HALF_COLUMNS)
    if pack is None or multiply is None or nbytes >= 4 * rows * columns:
        return None
    numbers, scales = _scaled_rows(matrix)
    packed = pack(numbers, None)

    def product(x: Tensor) -> Tensor:
        made: Tensor = multiply(x.float(), packed)
        return made.mul_(scales).to(matrix.dtype)

    return product, (scales, OpaqueWeight(packed, nbytes))


def _is_fast_for(matrix: CodedMatrix) -> bool:
    """Return whether torch's kernels of int8 and int4 have vectors for the matrix's inputs."""
    return matrix.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in _FAST


def _scale_a_row(matrix: CodedMatrix) -> bool:
    """Return whether a number is a code less a zero, times the scale of its row."""
    return matrix.group[1] >= matrix.shape[1] and matrix.minimums is None


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED else tensor


def _group(matrix: CodedMatrix) -> int | None:
    """Return the size of the operator's groups, into which the matrix's can be cut; or None.

    It is the largest of those that need the least padding.
    """
    columns, width = matrix.shape[1], matrix.group[1]
    sizes = [size for size in _GROUPS if width >= columns or width % size == 0]
    return min(sizes, key=lambda size: -columns % size, default=None)


def _packed(matrix: CodedMatrix, missing: int, pack: Callable[..., Tensor]) -> Tensor:
    """Return codes as the int4 operator wants them, padded with `missing` columns and with rows.

    uint8 [rows, columns / 2].
    """
    parts = []
    for codes in matrix.codes.split(_PACKED_AT_ONCE):
        halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
        parts.append(pack(pad(halves, (0, missing, 0, -len(codes) % _INT4_ROWS)), 1))
    return torch.cat(parts)


def _scales_and_zeros(matrix: CodedMatrix, size: int, rows: int) -> Tensor:
    """Return s and z of (code - 8) s + z for each group of the int4 operator.

    bfloat16 [groups, rows, 2]. rows: with those of padding.
    """
    by_row = matrix.with_row_scales()
    scales, zeros, minimums = by_row.scales, by_row.zeros, by_row.minimums
    offsets = torch.zeros_like(scales) if zeros is None else (MIDDLE - zeros.float()) * scales
    if minimums is not None:
        offsets = offsets - minimums
    groups = -(-by_row.shape[1] // size)
    both = torch.stack([scales, offsets], -1).transpose(0, 1)
    repeats = max(1, by_row.group[1] // size) if len(both) > 1 else groups
    both = both.repeat_interleave(repeats, 0)[:groups]
    return pad(both, (0, 0, 0, rows - both.shape[1])).to(matrix.dtype).contiguous()


def _scaled_rows(matrix: CodedMatrix) -> tuple[Tensor, Tensor]:
    """Return numbers [N, K] in float16's range, and the scales [N] by which rows are multiplied."""
    if _scale_a_row(matrix) and matrix.kind in ("int8", "int4"):
        by_row = matrix.with_row_scales()
        codes = replace(by_row, scales=torch.ones_like(by_row.scales)).decoded(torch.float32)
        return codes, by_row.scales[:, 0].contiguous()
    numbers = matrix.decoded(torch.float32)
    exponents = torch.frexp(numbers.abs().amax(1)).exponent - _HALF_EXPONENT
    ones = torch.ones(len(numbers))
    return numbers.mul_(torch.ldexp(ones, -exponents)[:, None]), torch.ldexp(ones, exponents)
