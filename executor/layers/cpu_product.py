"""Products on a CPU whose rows do not depend on the number of rows.

A row's bits are the same alone and among others.

Libraries choose among kernels by the number of rows, and kernels differ in the order in which they
add. The choice depends on the CPU, the type and the sizes. So each size of a weight is tried once,
when the first such weight is loaded. The layouts below are tried fastest first; the first layout is
used whose rows have the same bits for every number of rows that is tried. If none has, rows are
computed in padded blocks of one size, which is exact by construction.

A quantized matrix has layouts of its own, of which the last is the matrix decoded. They must also
give the decoded matrix's product.

MKL computes the same bits for all numbers of rows in its strict mode (see
ipc.config.exact_products_environment), where the CPU has that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.coded_layouts import float16, int4, int8
from sidestep.executor.layers.layouts.layout import LaidOut, Product
from sidestep.executor.layers.layouts.native_layouts import native, native_plain
from sidestep.executor.layers.layouts.native_layouts import takes as native_takes
from sidestep.executor.layers.layouts.plain_layouts import (
    in_blocks,
    packed,
    packed_in_pieces,
    plain,
    transposed,
    transposed_in_fours,
)
from sidestep.executor.layers.layouts.rounding_layouts import MOST_ERROR, eights, may_round
from sidestep.executor.weights.weight_loader import Matrix
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

_TRIED_ROWS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 40, 64, 65, 128, 129, 255, 256)
"""Numbers of rows that a layout is tried with."""
_TRIAL_PRODUCTS = 10_000_000_000
"""Multiplications that trying one size may take. For large weights, fewer numbers of rows are
tried."""

_CHECKED_ROWS = 4
"""Rows whose product with a quantized matrix is compared with the decoded matrix's."""
_TOLERANCE = 2e-3
"""Largest difference between the two in float32, relative to the products' norms. Numbers in
float16 give 3e-4."""
_ROUNDING = 4
"""Largest difference in other types, in roundings to that type."""
_ROUNDED_INPUTS = 8
"""Largest sum of the errors of rounding a row and a matrix to 8 bits, in their standard deviations.
"""

Layout = Callable[[Any], LaidOut | None]
"""Lay a matrix [N, K] out; None where this CPU has no such product of it."""


class CpuProduct:
    """x W^T for a matrix [N, K], laid out so that rows are independent.

    Each row of the result depends on that row of x alone.
    """

    def __init__(self, matrix: Matrix) -> None:
        self.kind, (self._product, self.weight), self._most_rows = _lay_out(matrix)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, N] for x [T, K]."""
        if x.shape[0] <= self._most_rows:
            return self._product(x)
        return torch.cat([self._product(part) for part in x.split(self._most_rows)])


def widened(weight: Tensor) -> LaidOut:
    """Keep the weight in float32, for types that the CPU would have to emulate.

    Results are rounded to the weight's type.
    """
    dtype, product = weight.dtype, CpuProduct(weight.float())
    return lambda x: product(x.float()).to(dtype), product.weight


def decoded(matrix: CodedMatrix) -> LaidOut:
    """Decode the matrix, once and for all."""
    product = CpuProduct(matrix.decoded())
    return product, product.weight


_LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        *(
            native_plain,
            plain,
            transposed,
            transposed_in_fours,
            packed,
            packed_in_pieces,
            widened,
            in_blocks,
        ),
        *(native, int4, eights, int8, float16, decoded),
    )
}
_chosen: dict[tuple[Any, ...], tuple[str, int]] = {}
"""By a matrix's size, form and candidates, and the number of threads: its layout, and the number of
rows that it takes at once."""


def _lay_out(matrix: Matrix) -> tuple[str, LaidOut, int]:
    """Return the layout's name, the matrix in it, and the number of rows that it takes at once."""
    candidates = tuple(_candidates(matrix))
    key = _form(matrix), candidates, torch.get_num_threads()
    if key not in _chosen:
        for name in candidates:
            if (tried := _tried(name, matrix)) is not None:
                _chosen[key] = name, tried[1]
                return name, *tried
        last = in_blocks if isinstance(matrix, Tensor) else decoded
        _chosen[key] = last.__name__, _TRIED_ROWS[-1]
    name, most_rows = _chosen[key]
    laid_out = _LAYOUTS[name](matrix)
    assert laid_out is not None, "the same layout could be had for a matrix of the same form"
    return name, laid_out, most_rows


def _form(matrix: Matrix) -> tuple[Any, ...]:
    """Return what the choice of a layout depends on."""
    if isinstance(matrix, Tensor):
        return matrix.shape, matrix.dtype
    return matrix.shape, matrix.dtype, matrix.described, matrix.group


def _candidates(matrix: Matrix) -> Iterator[str]:
    """Yield the names of layouts, fastest first."""
    if isinstance(matrix, CodedMatrix):
        if native_takes(matrix):
            yield "native"
        yield from ("int4", "eights") if may_round(matrix) else ("int4",)
        yield from ("int8", "float16")
    elif matrix.dtype == torch.float32:
        yield "native_plain"
        yield from ("packed", "packed_in_pieces", "transposed", "transposed_in_fours")
    else:
        if packed(matrix[:1]) is not None:  # oneDNN refuses to pack for a type without instructions
            yield from ("packed", "plain")
        if matrix.dtype == torch.bfloat16:
            yield "native_plain"
        yield "widened"


def _tried(name: str, matrix: Matrix) -> tuple[LaidOut, int] | None:
    """Return the matrix in a layout, and the largest number of rows that was tried.

    Return None if the layout must not be used.
    """
    if isinstance(matrix, Tensor):
        most_rows = _rows_that_agree(name, matrix)
        laid_out = _LAYOUTS[name](matrix) if most_rows else None
        return None if laid_out is None else (laid_out, most_rows)
    try:
        laid_out = _LAYOUTS[name](matrix)
        if laid_out is None or not _is_product(name, laid_out[0], matrix):
            return None
        most_rows = _rows_that_agree(name, matrix)
    except (RuntimeError, TypeError):  # Operators of another version, or without kernels.
        return None
    return (laid_out, most_rows) if most_rows else None


def _rows_that_agree(name: str, matrix: Matrix) -> int:
    """Return the largest number of rows that was tried.

    Return 0 if a row's bits depend on the number of rows, or there is no such layout.
    """
    trial = _with_equal_halves(matrix)
    laid_out = _LAYOUTS[name](trial)
    if laid_out is None:
        return 0
    product, _ = laid_out
    num_outputs, num_inputs = matrix.shape
    budget = _TRIAL_PRODUCTS // max(1, num_outputs * num_inputs)
    sizes = [
        rows for i, rows in enumerate(_TRIED_ROWS) if i < 5 or sum(_TRIED_ROWS[: i + 1]) <= budget
    ]
    most = sizes[-1]
    x = _inputs(most, matrix)
    if trial is not matrix:
        half = _half(num_inputs)
        x[:, half : 2 * half] = -x[:, :half]
        x[:, 2 * half :] = 0
    together = product(x)
    # The last rows, so that their index differs among fewer rows.
    return (
        most if all(torch.equal(product(x[most - n :]), together[most - n :]) for n in sizes) else 0
    )


def _with_equal_halves(matrix: Matrix) -> Matrix:
    """Return a matrix of the same form whose columns' halves are equal, in types of few bits.

    A result in few bits seldom shows the order in which float32 numbers were added. If the inputs'
    halves differ in sign alone, the sum is zero, but for errors that depend on that order.
    """
    if matrix.dtype == torch.float32:
        return matrix
    half = _half(matrix.shape[1])
    if isinstance(matrix, Tensor):
        return torch.cat([matrix[:, :half], matrix[:, :half], matrix[:, 2 * half :]], 1)
    codes = matrix.codes.clone()
    half //= matrix.packed
    codes[:, half : 2 * half] = codes[:, :half]

    def first_group(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[:, :1].expand_as(part).contiguous()

    scales = first_group(matrix.scales)
    assert scales is not None
    return replace(
        matrix,
        codes=codes,
        scales=scales,
        zeros=first_group(matrix.zeros),
        minimums=first_group(matrix.minimums),
    )


def _half(columns: int) -> int:
    """Return the even number of columns that is half of them, or a little less."""
    return columns // 4 * 2


def _is_product(name: str, product: Product, matrix: CodedMatrix) -> bool:
    """Return whether a layout gives the product with the matrix's numbers."""
    numbers, x = matrix.decoded(torch.float32), _inputs(_CHECKED_ROWS, matrix)
    expected = x.float() @ numbers.T
    # A sum of numbers with random signs is of this order, so one wrong group would be seen.
    size = x.float().norm(dim=1)[:, None] * numbers.norm(dim=1)
    tolerance = max(_TOLERANCE, _ROUNDING * torch.finfo(matrix.dtype).eps)
    if name in (native.__name__, eights.__name__):
        tolerance += _ROUNDED_INPUTS * MOST_ERROR / matrix.shape[1] ** 0.5
    return bool(((product(x).float() - expected).abs() <= tolerance * size).all())


def _inputs(rows: int, matrix: Matrix) -> Tensor:
    """Return random inputs [rows, K]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, matrix.shape[1], generator=generator).to(matrix.dtype)
