"""Products on a CPU whose rows do not depend on the number of rows.

A row's bits are the same alone and among others.

Libraries choose among kernels by the number of rows, and kernels differ in the order in which they
add. The choice depends on the CPU, the type and the sizes. So each size of a weight is tried once,
when the first such weight is loaded. The layouts below are tried fastest first; the first layout is
used whose rows have the same bits for every number of rows that is tried. If none has, rows are
computed in padded blocks of one size, which is exact by construction.

MKL computes the same bits for all numbers of rows in its strict mode (see
ipc.config.exact_products_environment), where the CPU has that mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.layout import LaidOut, Product
from sidestep.executor.layers.layouts.plain_layouts import (
    in_blocks,
    packed,
    plain,
    transposed,
    transposed_in_fours,
)

_TRIED_ROWS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 40, 64, 65, 128, 129, 255, 256)
"""Numbers of rows that a layout is tried with."""
_TRIAL_PRODUCTS = 10_000_000_000
"""Multiplications that trying one size may take. For large weights, fewer numbers of rows are
tried."""

Layout = Callable[[Tensor], LaidOut | None]
"""Lay a weight [N, K] out; None where this CPU has no such product."""


class CpuProduct:
    """x W^T for a weight [N, K], laid out so that rows are independent.

    Each row of the result depends on that row of x alone.
    """

    def __init__(self, weight: Tensor) -> None:
        self.kind, (self._product, self.weight), self._most_rows = _lay_out(weight)

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


_LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (plain, transposed, transposed_in_fours, packed, widened, in_blocks)
}
_chosen: dict[tuple[torch.Size, torch.dtype, int], tuple[str, int]] = {}
"""By a weight's size and type and the number of threads: its layout, and the number of rows that it
takes at once."""


def _lay_out(weight: Tensor) -> tuple[str, LaidOut, int]:
    """Return the layout's name, the weight in it, and the number of rows that it takes at once."""
    key = weight.shape, weight.dtype, torch.get_num_threads()
    if key not in _chosen:
        for name in _candidates(weight):
            laid_out = _LAYOUTS[name](weight)
            most_rows = 0 if laid_out is None else _rows_that_agree(laid_out[0], weight)
            if laid_out is not None and most_rows:
                _chosen[key] = name, most_rows
                return name, laid_out, most_rows
        _chosen[key] = in_blocks.__name__, _TRIED_ROWS[-1]
    name, most_rows = _chosen[key]
    laid_out = _LAYOUTS[name](weight)
    assert laid_out is not None, "the same layout could be had for a weight of the same size"
    return name, laid_out, most_rows


def _candidates(weight: Tensor) -> Iterator[str]:
    """Yield the names of layouts, fastest first."""
    if weight.dtype == torch.float32:
        yield from ("packed", "transposed", "transposed_in_fours")
    else:
        if packed(weight[:1]) is not None:  # oneDNN refuses to pack for a type without instructions
            yield from ("packed", "plain")
        yield "widened"


def _rows_that_agree(product: Product, weight: Tensor) -> int:
    """Return the largest number of rows that was tried.

    Return 0 if a row's bits depend on the number of rows.
    """
    num_outputs, num_inputs = weight.shape
    budget = _TRIAL_PRODUCTS // max(1, num_outputs * num_inputs)
    sizes = [
        rows for i, rows in enumerate(_TRIED_ROWS) if i < 5 or sum(_TRIED_ROWS[: i + 1]) <= budget
    ]
    most = sizes[-1]
    x = torch.randn(most, num_inputs, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    together = product(x)
    # The last rows, so that their index differs among fewer rows.
    return (
        most if all(torch.equal(product(x[most - n :]), together[most - n :]) for n in sizes) else 0
    )
