"""Layouts for products in C.

A plain matrix is kept in tiles of its rows, for sums in the order of the columns. A quantized one
keeps codes of 8 or 4 bits, and inputs are rounded to 8 bits.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64, c_void_p

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.layout import LaidOut, Product
from sidestep.executor.layers.layouts.native_matrices import (
    PackedMatrix,
    is_kept,
    kernel_of,
    packed_codes,
    packed_plain,
)
from sidestep.executor.layers.layouts.rounding_layouts import is_large, may_round, rounded
from sidestep.kernels.native.matrices import GROUP, ROUNDED_BYTES
from sidestep.kernels.native.tape import empty, launch
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

_FEWEST_NUMBERS = 1 << 15
"""A smaller plain matrix gains little, and is filled up to whole tiles. A single row is taken at
any size, since it is a gate of layers that a tape could not play with another product."""
_ROUNDED_ALONE = 256
"""Groups of inputs that each thread rounds for itself, as coded.c has it."""
_ALONE = 1 << 17
"""Products of plain numbers up to which one thread is faster than several."""
_ROWS_OF_A_BLOCK = 8
"""Rows that products of plain numbers multiply together, MOST_ROWS in plain.h."""
CODED, PLAIN = "coded.c", "plain.c"
"""The files of the kernels."""


class _Product(Structure):
    """Arguments of `product` in coded.c and plain.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("matrix", "x", "out", "memory")),
        *((name, c_int64) for name in ("rows", "stride")),
    )


def native(matrix: CodedMatrix) -> LaidOut | None:
    """Keep the codes, and round inputs to 8 bits.

    Codes of 8 bits that are not integers, with a scale for each group of columns or for a row, are
    rounded again.
    """
    kernel = kernel_of(CODED, "product", matrix.dtype)
    if kernel is None or not takes(matrix):
        return None
    packed = packed_codes(matrix if is_kept(matrix) else rounded(matrix), kernel.tile)
    return _coded_product(kernel.address, packed), packed.kept


def native_plain(matrix: Tensor) -> LaidOut | None:
    """Keep a matrix in tiles of rows."""
    kernel = kernel_of(PLAIN, "product", matrix.dtype)
    if kernel is None or (matrix.numel() < _FEWEST_NUMBERS and len(matrix) > 1):
        return None
    packed = packed_plain(matrix, kernel.tile)
    return _plain_product(kernel.address, packed), packed.kept


def takes(matrix: CodedMatrix) -> bool:
    """Return whether a matrix loses little, and is large enough to gain by it."""
    return is_large(matrix) if is_kept(matrix) else may_round(matrix)


def _coded_product(kernel: int, packed: PackedMatrix) -> Product:
    """Return a product with a matrix in codes."""
    matrix = packed.described
    groups = -(-matrix.inputs // GROUP)

    def product(x: Tensor, packed: PackedMatrix = packed) -> Tensor:
        x, out = _with_rows_together(x), empty((len(x), matrix.outputs), x.dtype)
        rounded_groups, memory = len(x) * groups, None
        if rounded_groups > _ROUNDED_ALONE:
            memory = empty((rounded_groups * ROUNDED_BYTES,), torch.uint8)
        launch(kernel, _arguments(packed, x, out, memory))
        return out

    return product


def _plain_product(kernel: int, packed: PackedMatrix) -> Product:
    """Return a product with a matrix in tiles."""
    matrix = packed.described

    def product(x: Tensor, packed: PackedMatrix = packed) -> Tensor:
        x, out = _with_rows_together(x), empty((len(x), matrix.outputs), x.dtype)
        room, few = _room_for_rows(x), len(x) * matrix.inputs * matrix.outputs < _ALONE
        launch(kernel, _arguments(packed, x, out, room), alone=few)
        return out

    return product


def _arguments(packed: PackedMatrix, x: Tensor, out: Tensor, memory: Tensor | None) -> _Product:
    return _Product(
        ctypes.addressof(packed.described),
        x.data_ptr(),
        out.data_ptr(),
        None if memory is None else memory.data_ptr(),
        len(x),
        x.stride(0),
    )


def _room_for_rows(x: Tensor) -> Tensor | None:
    """Return memory for rows in float32, or for blocks of them; None where none is needed."""
    rows, columns = x.shape
    if rows <= _ROWS_OF_A_BLOCK:
        return None if x.dtype == torch.float32 else empty(x.shape, torch.float32)
    return empty((rows + -rows % _ROWS_OF_A_BLOCK, columns), torch.float32)


def _with_rows_together(x: Tensor) -> Tensor:
    """Return x with rows whose numbers lie side by side."""
    return x if x.stride(1) == 1 else x.contiguous()
