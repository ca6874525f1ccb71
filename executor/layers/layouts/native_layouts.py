"""Layouts for products in C.

A plain matrix is kept in tiles of its rows (kernels/native/plain.c). A quantized one keeps codes of
8 or 4 bits, and inputs are rounded to 8 bits (kernels/native/products.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestep.executor.layers.layouts.layout import LaidOut, Product
from sidestep.executor.layers.layouts.rounding_layouts import is_large, may_round, rounded
from sidestep.kernels.native.library import NoLibraryError, kernel
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix

_TYPES = (torch.float32, torch.bfloat16)
GROUP = 32
"""Columns whose products are summed in whole numbers."""
_FOUR = 4
"""Codes of a row that lie side by side."""
_FEWEST_NUMBERS = 1 << 16
"""A smaller plain matrix gains little, and is filled up to whole tiles."""
_LARGEST_MINIMUM = 1024.0
"""Largest minimum of a row, relative to its factor."""
_ARGUMENTS = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32)
_PLAIN_ARGUMENTS = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int32)
_PACKED_AT_ONCE = 4096
"""Rows that are packed at a time, so that codes in a byte take little memory."""


class _Matrix(Structure):
    """A matrix, as the kernel knows it: `Matrix` in products.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "minimums", "factors")),
        *((name, c_int64) for name in ("outputs", "inputs")),
        *((name, c_int32) for name in ("bits", "repeat")),
    )


def native(matrix: CodedMatrix) -> LaidOut | None:
    """Keep the codes, and round inputs to 8 bits.

    Codes of 8 bits that are not integers, with a scale for each group of columns or for a row, are
    rounded again.
    """
    found = _kernel(matrix.dtype)
    if found is None or not takes(matrix):
        return None
    launch, tile = found
    if not _is_kept(matrix):
        matrix = rounded(matrix)
    rows, columns = matrix.shape
    by_row = matrix.with_row_scales()
    groups = -(-columns // GROUP)
    codes = torch.cat(
        [_packed(part, tile, groups, matrix.kind) for part in by_row.codes.split(_PACKED_AT_ONCE)]
    )
    factors, scales, minimums = (
        None if part is None else _filled_up(part, tile) for part in _scales(by_row)
    )
    assert factors is not None
    kept = [part for part in (codes, factors, scales, minimums) if part is not None]
    width = by_row.group[1]
    described = _Matrix(
        codes=codes.data_ptr(),
        scales=0 if scales is None else scales.data_ptr(),
        minimums=0 if minimums is None else minimums.data_ptr(),
        factors=factors.data_ptr(),
        outputs=rows,
        inputs=columns,
        bits=4 if matrix.kind == "int4" else 8,
        repeat=min(groups, -(-width // GROUP)),
    )
    return _product(launch, ctypes.byref(described), rows=rows, kept=kept), tuple(kept)


def native_plain(matrix: Tensor) -> LaidOut | None:
    """Keep a matrix in tiles of rows, for sums in the order of the columns."""
    if matrix.dtype not in _TYPES or matrix.numel() < _FEWEST_NUMBERS:
        return None
    try:
        launch = kernel("plain.c", "product", matrix.dtype, *_PLAIN_ARGUMENTS)
        width = kernel("plain.c", "width", matrix.dtype)()
    except NoLibraryError:
        return None
    rows, columns = matrix.shape
    filled = pad(matrix, (0, 0, 0, -rows % width))
    tiles = filled.view(-1, width, columns).transpose(1, 2).contiguous()

    matrix_of = tiles.data_ptr(), rows, columns
    return _product(launch, *matrix_of, rows=rows, kept=[tiles]), tiles


def takes(matrix: CodedMatrix) -> bool:
    """Return whether a matrix loses little, and is large enough to gain by it."""
    return is_large(matrix) if _is_kept(matrix) else may_round(matrix)


def _is_kept(matrix: CodedMatrix) -> bool:
    """Return whether the kernel takes the matrix's codes as they are."""
    width, columns = matrix.group[1], matrix.shape[1]
    return matrix.kind in ("int8", "int4") and (width % GROUP == 0 or width >= columns)


def _product(launch: Callable[..., int], *matrix: Any, rows: int, kept: list[Tensor]) -> Product:
    """Return a product. matrix: the kernel's first arguments; kept: the memory that they point to.

    rows: of the matrix.
    """

    def product(x: Tensor, kept: list[Tensor] = kept) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), rows)
        failed = launch(
            *matrix, x.data_ptr(), len(x), x.stride(0), out.data_ptr(), torch.get_num_threads()
        )
        if failed:
            raise MemoryError("there is no memory for the inputs of a product")
        return out

    return product


def _packed(codes: Tensor, tile: int, groups: int, kind: str) -> Tensor:
    """Return codes of some rows as the kernel reads them: [tiles, groups, vectors, bytes]."""
    if kind == "int4":
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    else:
        codes = codes.view(torch.uint8) ^ 128
    filled = pad(codes, (0, groups * GROUP - codes.shape[1], 0, -len(codes) % tile))
    by_four = filled.view(-1, tile, groups, GROUP // _FOUR, _FOUR)
    if kind == "int4":
        by_four = by_four[:, :, :, ::2] | by_four[:, :, :, 1::2] << 4
    return by_four.permute(0, 2, 3, 1, 4).flatten(3).contiguous()


def _scales(matrix: CodedMatrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return factors float32 [N, 1], and scales and minimums float16 [N, groups] or None.

    A row's factor is near its largest scale, so that its scales are in float16's range. Where
    minimums are far larger, it follows from them.
    """
    scales, zeros, minimums = matrix.scales.float(), matrix.zeros, matrix.minimums
    offsets = None if minimums is None else minimums.float()
    if matrix.kind == "int4" and (zeros is not None or offsets is not None):
        middle = MIDDLE if zeros is None else zeros.float()
        offsets = middle * scales + (0 if offsets is None else offsets)
    if offsets is None and scales.shape[1] == 1:
        return scales, None, None
    factors = scales.abs().amax(1, keepdim=True)
    if offsets is not None:
        factors = factors.maximum(offsets.abs().amax(1, keepdim=True) / _LARGEST_MINIMUM)
    factors = torch.where(factors > 0, factors, 1.0)
    halves = [None if part is None else (part / factors).half() for part in (scales, offsets)]
    return factors, halves[0], halves[1]


def _filled_up(part: Tensor, tile: int) -> Tensor:
    """Return [N, G] as [tiles, G, rows of a tile]."""
    filled = pad(part, (0, 0, 0, -len(part) % tile))
    return filled.view(-1, tile, part.shape[1]).transpose(1, 2).contiguous()


def _kernel(dtype: torch.dtype) -> tuple[Callable[..., int], int] | None:
    """Return the kernel for a type of inputs, and the rows of a tile; None if there is none."""
    if dtype not in _TYPES:
        return None
    try:
        return (
            kernel("products.c", "product", dtype, *_ARGUMENTS),
            kernel("products.c", "lanes", dtype)(),
        )
    except NoLibraryError:
        return None
