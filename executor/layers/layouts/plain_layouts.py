"""Layouts of matrices that are not quantized."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.layout import LaidOut

_PACK_FOR_ROWS = 8
"""The batch size that the packed layout is chosen for."""
_BLOCK_ROWS = 16
"""Rows of a padded block."""
_FEWEST_ROWS = 4
"""Fewest rows that MKL multiplies with the kernels that it has for many."""
_PACKED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that packed products are computed with. oneDNN compiles and keeps a product for
each number: with all numbers, a worker's memory would grow with every new size of a step."""
_PIECE = 1024
"""Columns of a piece. For more columns oneDNN splits some sums, depending on the number of rows."""


def plain(weight: Tensor) -> LaidOut:
    """Use the weight as it is."""
    return lambda x: torch.nn.functional.linear(x, weight), weight


def transposed(weight: Tensor) -> LaidOut:
    """Transpose the weight: the layout with the least overhead."""
    turned = weight.t().contiguous()
    return lambda x: torch.mm(x, turned), turned


def transposed_in_fours(weight: Tensor) -> LaidOut:
    """Transpose the weight, and multiply at least four rows.

    Without its strict mode MKL has other kernels for fewer rows.
    """
    multiply, turned = transposed(weight)

    def multiply_padded(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= _FEWEST_ROWS:
            return multiply(x)
        return multiply(torch.nn.functional.pad(x, (0, 0, 0, _FEWEST_ROWS - rows)))[:rows]

    return multiply_padded, turned


def packed(weight: Tensor) -> LaidOut | None:
    """Pack the weight as oneDNN wants it, by operators that are private to torch.

    Return None where they are missing, or give another result than the plain product.
    """
    operators = _packing()
    if operators is None:
        return None
    reorder, multiply = operators
    try:
        laid_out = reorder(weight, _PACK_FOR_ROWS)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        got, expected = (
            multiply(probe, laid_out, None, "none", [], ""),
            probe.float() @ weight.float().T,
        )
    except RuntimeError:
        return None
    bound = 0.02 * weight.float().abs().sum(1)
    if not bool(((got.float() - expected).abs() <= bound).all()):
        return None

    def multiply_padded(x: Tensor) -> Tensor:
        rows = x.shape[0]
        size = next((size for size in _PACKED_ROWS if size >= rows), rows)
        if size > rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, size - rows))
        return multiply(x, laid_out, None, "none", [], "")[:rows]

    return multiply_padded, laid_out


def packed_in_pieces(weight: Tensor) -> LaidOut | None:
    """Pack pieces of the weight's columns, whose products are added in the order of the columns.

    Return None for a weight of a single piece, and where `packed` does.
    """
    columns = weight.shape[1]
    starts = range(0, columns, _PIECE)
    pieces = [packed(weight[:, first : first + _PIECE].contiguous()) for first in starts]
    found = [piece for piece in pieces if piece is not None]
    if len(found) < max(2, len(pieces)):
        return None

    def multiply(x: Tensor) -> Tensor:
        parts = [part.contiguous() for part in x.split(_PIECE, 1)]
        made = found[0][0](parts[0])
        for (product, _), part in zip(found[1:], parts[1:], strict=True):
            made += product(part)
        return made

    kept: list[Tensor] = []
    for _, piece in found:
        assert isinstance(piece, Tensor)
        kept.append(piece)
    return multiply, tuple(kept)


def in_blocks(weight: Tensor) -> LaidOut:
    """Multiply rows in blocks of one size, so that the library always computes the same product."""
    turned = weight.t().contiguous()

    def multiply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % _BLOCK_ROWS))
        return torch.cat([torch.mm(part, turned) for part in whole.split(_BLOCK_ROWS)])[:rows]

    return multiply, turned


def _packing() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """Return oneDNN's operators that pack a weight and multiply by it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    except (AttributeError, RuntimeError):
        return None
