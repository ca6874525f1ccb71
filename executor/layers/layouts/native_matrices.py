"""Matrices in the memory of a CPU as kernels in C read them.

A plain matrix is kept in tiles of its rows (kernels/native/source/plain.h), in 16 bits a number
where that loses nothing. A quantized one keeps codes of 8 or 4 bits
(kernels/native/source/coded.h).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestep.kernels.native.large_pages import empty_in_large_pages, in_large_pages
from sidestep.kernels.native.library import NoLibraryError, address, library_of
from sidestep.kernels.native.matrices import GROUP, PLAIN_FORMS, CodedMatrixC, PlainMatrixC
from sidestep.kernels.native.packing import exact_type, pack_codes
from sidestep.kernels.quantized.coded_matrix import MIDDLE, TABLES, CodedMatrix, Codes

TYPES = (torch.float32, torch.bfloat16)
"""Types of the inputs."""
_MIDDLE_BYTE = 128
"""The code of zero in 8 bits."""
_LARGEST_MINIMUM = 1024.0
"""Largest minimum of a row, relative to its factor."""
_TABLE_STEPS: dict[Codes, float] = {"fp4": 0.5, "nf4": 1 / 127}
"""Kinds of codes that are looked up -> the step by which their numbers are whole ones of 8 bits.
fp4's are exact; those of nf4 are rounded, by at most 0.4% of the largest."""


class PackedMatrix(NamedTuple):
    """A matrix that kernels in C read."""

    described: CodedMatrixC | PlainMatrixC
    kept: tuple[Tensor, ...]
    """The memory that it points to."""


class Kernel(NamedTuple):
    """A kernel that multiplies with matrices."""

    address: int
    tile: int
    """Rows of a matrix that it multiplies together."""


def kernel_of(source: str, name: str, dtype: torch.dtype, *definitions: str) -> Kernel | None:
    """Return a kernel of a file for a type of inputs; None where there is none.

    definitions: of the preprocessor.
    """
    if dtype not in TYPES:
        return None
    try:
        library = library_of(source, dtype, *definitions)
    except NoLibraryError:
        return None
    return Kernel(address(library, name), int(library.tile()))


def packed_plain(matrix: Tensor, tile: int, bias: Tensor | None = None) -> PackedMatrix:
    """Return a matrix [N, K] in tiles of rows. tile: rows of each."""
    rows, columns = matrix.shape
    filled = pad(matrix, (0, 0, 0, -rows % tile))
    tiled = filled.view(-1, tile, columns).transpose(1, 2)
    kept = exact_type(matrix)
    tiles = empty_in_large_pages(tiled.shape, kept).copy_(tiled)
    wide, form = _wide_bias(bias, tile), PLAIN_FORMS.index(kept)
    described = PlainMatrixC(tiles.data_ptr(), _address(wide), rows, columns, form)
    return PackedMatrix(described, _present(tiles, wide))


def is_kept(matrix: CodedMatrix) -> bool:
    """Return whether kernels take the matrix's codes as they are."""
    width, columns = matrix.group[1], matrix.shape[1]
    whole = matrix.kind in ("int8", "int4", *_TABLE_STEPS)
    return whole and (width % GROUP == 0 or width >= columns)


def packed_codes(matrix: CodedMatrix, tile: int, bias: Tensor | None = None) -> PackedMatrix:
    """Return a matrix whose codes are kept, see `is_kept`. tile: rows of a tile."""
    rows, columns = matrix.shape
    by_row = matrix.with_row_scales()
    bits = 8 // matrix.packed
    codes = pack_codes(by_row.codes, tile, bits)
    factors, scales, minimums = (
        None if part is None else in_large_pages(_filled_up(part, tile)) for part in _scales(by_row)
    )
    table, wide = _table(matrix.kind), _wide_bias(bias, tile)
    described = CodedMatrixC(
        codes=codes.data_ptr(),
        scales=_address(scales),
        minimums=_address(minimums),
        factors=_address(factors),
        bias=_address(wide),
        table=_address(table),
        outputs=rows,
        inputs=columns,
        bits=bits,
        repeat=min(-(-columns // GROUP), -(-by_row.group[1] // GROUP)),
        middle=_middle(matrix, has_minimums=minimums is not None),
    )
    return PackedMatrix(described, _present(codes, factors, scales, minimums, wide, table))


def _middle(matrix: CodedMatrix, *, has_minimums: bool) -> int:
    """Return the code of zero, or what it stands for in a table, before the minimum."""
    if matrix.kind in _TABLE_STEPS:
        return -_whole_numbers(matrix.kind)[0]
    if matrix.kind == "int8":
        return _MIDDLE_BYTE
    return 0 if has_minimums else MIDDLE


def _whole_numbers(kind: Codes) -> tuple[int, list[int]]:
    """Return the least of the whole numbers that codes stand for, and all of them."""
    numbers = [round(number / _TABLE_STEPS[kind]) for number in TABLES[kind]]
    return min(numbers), numbers


@functools.cache
def _table(kind: Codes) -> Tensor | None:
    """Return the numbers of the codes in bytes, from 0 on; None for codes that are numbers."""
    if kind not in _TABLE_STEPS:
        return None
    least, numbers = _whole_numbers(kind)
    return torch.tensor([number - least for number in numbers], dtype=torch.uint8)


def _scales(matrix: CodedMatrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return factors float32 [N, 1], and scales and minimums float16 [N, groups] or None.

    A row's factor is near its largest scale, so that its scales are in float16's range. Where
    minimums are far larger, it follows from them.
    """
    scales, zeros, minimums = matrix.scales.float(), matrix.zeros, matrix.minimums
    if matrix.kind in _TABLE_STEPS:
        scales = scales * _TABLE_STEPS[matrix.kind]
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


def _wide_bias(bias: Tensor | None, tile: int) -> Tensor | None:
    """Return a bias [N] in float32, filled up to whole tiles."""
    return None if bias is None else pad(bias.float(), (0, -len(bias) % tile))


def _present(*parts: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(part for part in parts if part is not None)


def _address(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()
