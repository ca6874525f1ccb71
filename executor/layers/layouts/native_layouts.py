"""Layouts for products in C.

A plain matrix is kept in tiles of its rows (kernels/native/plain.c). A quantized one keeps codes of
8 or 4 bits, and inputs are rounded to 8 bits (kernels/native/products.c).
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestep.executor.layers.layouts.layout import LaidOut, Product
from sidestep.executor.layers.layouts.rounding_layouts import is_large, may_round, rounded
from sidestep.kernels.native.large_pages import empty_in_large_pages, in_large_pages
from sidestep.kernels.native.library import NoLibraryError, address, library_of
from sidestep.kernels.native.tape import empty, launch
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix

_TYPES = (torch.float32, torch.bfloat16)
GROUP = 32
"""Columns whose products are summed in whole numbers."""
_FOUR = 4
"""Codes of a row that lie side by side."""
_FEWEST_NUMBERS = 1 << 15
"""A smaller plain matrix gains little, and is filled up to whole tiles."""
_LARGEST_MINIMUM = 1024.0
"""Largest minimum of a row, relative to its factor."""
_ROUNDED_ALONE = 256
"""Groups of inputs that each thread rounds for itself, as products.c has it."""
_ROUNDED_BYTES = GROUP + 8
"""Memory of a rounded group: its codes, their sum and its scale."""
_ALONE = 1 << 17
"""Products of plain numbers up to which one thread is faster than several."""
_PACKED_AT_ONCE = 4096
"""Rows that are packed at a time, so that codes in a byte take little memory. Whole tiles."""


class _Matrix(Structure):
    """A matrix, as the kernel knows it: `Matrix` in products.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "minimums", "factors")),
        *((name, c_int64) for name in ("outputs", "inputs")),
        *((name, c_int32) for name in ("bits", "repeat")),
    )


class _Product(Structure):
    """Arguments of `product` in products.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("matrix", "x", "out", "memory")),
        *((name, c_int64) for name in ("rows", "stride")),
    )


class _PlainProduct(Structure):
    """Arguments of `product` in plain.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "x", "out", "wider")),
        *((name, c_int64) for name in ("outputs", "inputs", "rows", "stride")),
    )


def native(matrix: CodedMatrix) -> LaidOut | None:
    """Keep the codes, and round inputs to 8 bits.

    Codes of 8 bits that are not integers, with a scale for each group of columns or for a row, are
    rounded again.
    """
    found = _kernel(matrix.dtype)
    if found is None or not takes(matrix):
        return None
    kernel, tile = found
    if not _is_kept(matrix):
        matrix = rounded(matrix)
    rows, columns = matrix.shape
    by_row = matrix.with_row_scales()
    groups = -(-columns // GROUP)
    half = 2 if matrix.kind == "int4" else 1
    codes = empty_in_large_pages(
        (-(-rows // tile), groups, GROUP // _FOUR // half, tile * _FOUR), torch.uint8
    )
    for first in range(0, rows, _PACKED_AT_ONCE):
        part = by_row.codes[first : first + _PACKED_AT_ONCE]
        packed = _packed(part, tile, groups, matrix.kind)
        codes[first // tile : first // tile + len(packed)] = packed
    factors, scales, minimums = (
        None if part is None else in_large_pages(_filled_up(part, tile)) for part in _scales(by_row)
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
    return _coded_product(kernel, described, tuple(kept)), tuple(kept)


def native_plain(matrix: Tensor) -> LaidOut | None:
    """Keep a matrix in tiles of rows, for sums in the order of the columns."""
    if matrix.dtype not in _TYPES or matrix.numel() < _FEWEST_NUMBERS:
        return None
    try:
        library = library_of("plain.c", matrix.dtype)
    except NoLibraryError:
        return None
    rows, columns = matrix.shape
    width = library.width()
    filled = pad(matrix, (0, 0, 0, -rows % width))
    tiles = in_large_pages(filled.view(-1, width, columns).transpose(1, 2))
    return _plain_product(address(library, "product"), tiles, rows, columns), tiles


def takes(matrix: CodedMatrix) -> bool:
    """Return whether a matrix loses little, and is large enough to gain by it."""
    return is_large(matrix) if _is_kept(matrix) else may_round(matrix)


def _is_kept(matrix: CodedMatrix) -> bool:
    """Return whether the kernel takes the matrix's codes as they are."""
    width, columns = matrix.group[1], matrix.shape[1]
    return matrix.kind in ("int8", "int4") and (width % GROUP == 0 or width >= columns)


def _coded_product(kernel: int, matrix: _Matrix, kept: tuple[Tensor, ...]) -> Product:
    """Return a product with a matrix. kept: the memory that the matrix points to."""
    groups = -(-matrix.inputs // GROUP)

    def product(x: Tensor, kept: tuple[Tensor, ...] = kept) -> Tensor:
        x, out = _with_rows_together(x), empty((len(x), matrix.outputs), x.dtype)
        rounded_groups, memory = len(x) * groups, None
        if rounded_groups > _ROUNDED_ALONE:
            memory = empty((rounded_groups * _ROUNDED_BYTES,), torch.uint8)
        launch(
            kernel,
            _Product(
                ctypes.addressof(matrix),
                x.data_ptr(),
                out.data_ptr(),
                None if memory is None else memory.data_ptr(),
                len(x),
                x.stride(0),
            ),
        )
        return out

    return product


def _plain_product(kernel: int, tiles: Tensor, outputs: int, inputs: int) -> Product:
    """Return a product with a matrix in tiles."""

    def product(x: Tensor) -> Tensor:
        x, out = _with_rows_together(x), empty((len(x), outputs), x.dtype)
        wider = None if x.dtype == torch.float32 else empty(x.shape, torch.float32)
        launch(
            kernel,
            _PlainProduct(
                tiles.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                None if wider is None else wider.data_ptr(),
                outputs,
                inputs,
                len(x),
                x.stride(0),
            ),
            alone=len(x) * inputs * outputs < _ALONE,
        )
        return out

    return product


def _with_rows_together(x: Tensor) -> Tensor:
    """Return x with rows whose numbers lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


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
    return filled.view(-1, tile, part.shape[1]).transpose(1, 2)


def _kernel(dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the kernel for a type of inputs, and the rows of a tile; None if there is none."""
    if dtype not in _TYPES:
        return None
    try:
        library = library_of("products.c", dtype)
    except NoLibraryError:
        return None
    return address(library, "product"), library.lanes()
