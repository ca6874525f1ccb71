"""RMSNorm in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ahead import Ahead
from sidestep.kernels.ops import rms_norm as reference
from sidestep.kernels.triton.rms_norm_triton import rms_norm
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    needs_gpu,
    needs_hopper,
    poisoned,
    unchanged,
)

SHAPES = [(1, 1), (1, 7), (3, 16), (5, 48), (4, 33), (2, 257), (1, 1024), (17, 130)]
LARGE = [(1, 4096), (300, 4096), (7, 5120), (3, 16384), (65, 3584)]


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check(rows: int, size: int, dtype: torch.dtype, eps: float) -> None:
    values = Values(rows * size)
    x, weight = values.normal(rows, size, dtype=dtype, scale=3), values.normal(size, dtype=dtype)
    # A row's neighbours are NaN: one element read beyond the row would show.
    x, weight = guarded(x), guarded(weight)
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        out = rms_norm(x, weight, eps)
    assert out.shape == x.shape and out.dtype == dtype
    assert_close(out, exact(x, weight, eps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    check(rows, size, dtype, 1e-6)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), LARGE)
def test_large_rows(rows: int, size: int, dtype: torch.dtype) -> None:
    check(rows, size, dtype, 1e-6)


@pytest.mark.parametrize("rows", [1, 6])
def test_rows_may_lie_apart(rows: int) -> None:
    """Space rows as the last tokens of requests lie among all tokens."""
    values, size = Values(rows), 40
    wide = poisoned(rows, 3 * size, dtype=DTYPE)
    x = wide[:, size : 2 * size].copy_(values.normal(rows, size, dtype=DTYPE))
    weight = values.normal(size, dtype=DTYPE)
    with unchanged(wide=wide, weight=weight), PoisonedAllocations():
        out = rms_norm(x, weight, 1e-6)
    assert_close(out, exact(x, weight, 1e-6))


def test_zero_and_tiny_rows_are_ruled_by_epsilon() -> None:
    x, weight = torch.full((2, 16), 1e-5, device=DEVICE), torch.ones(16, device=DEVICE)
    x[1] = 0
    out = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-6), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_types_round_where_the_reference_rounds(dtype: torch.dtype) -> None:
    values = Values(3)
    x, weight = values.normal(20, 72, dtype=dtype), values.normal(72, dtype=dtype)
    expected, out = reference.rms_norm(x.cpu(), weight.cpu(), 1e-6), rms_norm(x, weight, 1e-6)
    # The mean may be summed in another order: that rarely moves a value across a rounding border.
    assert (out.cpu() != expected).float().mean() < 5e-3


@needs_hopper
@pytest.mark.parametrize("rows", [1, 3, 256])
def test_what_it_asks_l2_for_changes_nothing(rows: int) -> None:
    values, dtype = Values(rows), torch.bfloat16
    x, weight = values.normal(rows, 2048, dtype=dtype), values.normal(2048, dtype=dtype)
    first, matrices = (
        guarded(values.normal(*shape, dtype=dtype)) for shape in ((128, 2048), (9, 200, 2048))
    )
    expected = rms_norm(x, weight, 1e-6)
    with unchanged(x=x, weight=weight, first=first, matrices=matrices), PoisonedAllocations():
        out = rms_norm(x, weight, 1e-6, Ahead(first, matrices[:7, :128]))
    assert torch.equal(out, expected)
