"""A layout of quantized matrices whose product rounds its inputs, each row with a scale of its own.

Sums of products of whole numbers are exact. So a row's bits do not depend on other rows, in
whatever order a library adds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.layout import LaidOut, OpaqueWeight, operator
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

LARGEST = 127
"""Largest code of a rounded number, with either sign."""
MOST_ERROR = 0.02
"""Error of rounding a matrix again, relative to the norms of its groups, up to which it may be
rounded. Random numbers have an error of 0.01, and 4 bits in groups of 32 one of 0.08."""
_MIDDLE = 128
"""The code of zero, as the operator's inputs have no sign."""
_FEWEST_NUMBERS = 3 << 17
"""A smaller matrix costs no less time in 8 bits than in the run's type."""
_MOST_COLUMNS = 1 << 16
"""Sums of more products of two codes may not fit in 32 bits."""
_GROUP = 32
"""Columns whose error is measured together."""
_SAMPLED_ROWS = 256
"""Rows whose error is measured."""
_BYTES_A_ROW = 12
"""Bytes that the operator keeps for a row beside its codes: a scale, a zero and a sum."""


def eights(matrix: CodedMatrix) -> LaidOut | None:
    """Keep codes of 8 bits with a scale a row, and round inputs to 8 bits.

    Codes of integers with one scale a row are kept exactly. Other numbers are rounded again.
    """
    pack, multiply = (
        operator("quantized", name)
        for name in ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32")
    )
    if pack is None or multiply is None or not _adds_exactly(pack, multiply):
        return None
    again = rounded(matrix)
    codes, scales = again.codes, again.scales[:, 0]
    packed = _packed(codes, scales, pack)

    def product(x: Tensor) -> Tensor:
        wide = x.float()
        largest = torch.linalg.vector_norm(wide, torch.inf, -1, True)
        # A row of zeros gives 0 / 0, which may get any code: its product is multiplied by 0.
        made: Tensor = multiply(wide / largest, 1 / LARGEST, _MIDDLE, packed)
        return made.mul_(largest).to(matrix.dtype)

    return product, OpaqueWeight(packed, codes.nbytes + _BYTES_A_ROW * len(codes))


def may_round(matrix: CodedMatrix) -> bool:
    """Return whether a matrix is large enough, and loses little when it is rounded again."""
    if not is_large(matrix):
        return False
    if _is_rounded(matrix):
        return True
    rows = len(matrix.codes)
    sample = matrix.index_select(0, torch.arange(0, rows, -(-rows // _SAMPLED_ROWS)))
    numbers = sample.decoded(torch.float32)
    errors = _squares(rounded(sample).decoded(torch.float32) - numbers)
    # One group of large numbers makes the steps of its row coarse, so each group counts alike.
    return bool((errors / _squares(numbers)).nanmean() <= MOST_ERROR**2)


def is_large(matrix: CodedMatrix) -> bool:
    """Return whether products in 8 bits are faster, and their sums fit in 32 bits."""
    rows, columns = matrix.shape
    return rows * columns >= _FEWEST_NUMBERS and columns <= _MOST_COLUMNS


def _squares(numbers: Tensor) -> Tensor:
    """Return the sums of the squares of each group of a row's numbers."""
    filled: Tensor = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % _GROUP))
    sums: Tensor = filled.unflatten(1, (-1, _GROUP)).square().sum(-1)
    return sums


def _is_rounded(matrix: CodedMatrix) -> bool:
    """Return whether the matrix has the layout's codes already."""
    one_scale = matrix.group[1] >= matrix.shape[1] and matrix.minimums is None
    return matrix.kind == "int8" and one_scale


def rounded(matrix: CodedMatrix) -> CodedMatrix:
    """Return the matrix in codes of 8 bits with one scale a row."""
    if _is_rounded(matrix):
        return matrix.with_row_scales()
    numbers = matrix.decoded(torch.float32)
    scales = torch.linalg.vector_norm(numbers, torch.inf, -1, True).div_(LARGEST)
    codes = numbers.div_(scales).nan_to_num_(0.0).round_().clamp_(-LARGEST, LARGEST)
    return CodedMatrix(
        kind="int8",
        codes=codes.to(torch.int8),
        scales=scales,
        group=(1, matrix.shape[1]),
        dtype=matrix.dtype,
    )


def _adds_exactly(pack: Callable[..., object], multiply: Callable[..., Tensor]) -> bool:
    """Return whether the sums of the largest codes are right.

    A CPU without instructions for sums in 32 bits adds pairs in 16 bits, which cuts large sums off.
    """
    rows, columns = 32, 64
    codes = torch.full((rows, columns), LARGEST, dtype=torch.int8)
    made = multiply(
        torch.ones(1, columns), 1 / LARGEST, _MIDDLE, _packed(codes, torch.ones(rows), pack)
    )
    expected = torch.full((1, rows), float(columns * LARGEST))
    return made.shape == expected.shape and torch.allclose(made, expected)


def _packed(codes: Tensor, scales: Tensor, pack: Callable[..., object]) -> object:
    """Return a matrix as the operator wants it."""
    zeros = torch.zeros(len(codes), dtype=torch.int64)
    with warnings.catch_warnings():
        # Such tensors will leave torch one day. Then there is no such layout.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation")
        made = torch._make_per_channel_quantized_tensor(
            codes.contiguous(), scales.double(), zeros, 0
        )
    return pack(made, None)
