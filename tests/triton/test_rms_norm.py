"""RMSNorm in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels import rms_norm as reference
from sidestep.kernels.rms_norm_triton import add_rms_norm, rms_norm
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_close,
    assert_margins_untouched,
    guarded,
    needs_gpu,
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
    # A row's neighbours are NaN: one element read too many would show.
    x, weight = guarded(x), guarded(weight)
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        out = rms_norm(x, weight, eps)
    assert out.shape == x.shape and out.dtype == dtype
    assert_close(out, exact(x, weight, eps))


def check_add(rows: int, size: int, dtype: torch.dtype, eps: float) -> None:
    values = Values(rows + size)
    x, residual = guarded(values.normal(rows, size, dtype=dtype)), guarded(values.normal(rows, size, dtype=dtype))
    weight, total = guarded(values.normal(size, dtype=dtype)), x.double() + residual.double()
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        out = add_rms_norm(x, residual, weight, eps)
    assert torch.equal(residual, total.to(dtype)), "the sum is rounded once"
    assert_close(out, exact(residual, weight, eps))
    assert_margins_untouched(residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    check(rows, size, dtype, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_norm_of_the_sum(rows: int, size: int, dtype: torch.dtype) -> None:
    check_add(rows, size, dtype, 1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), LARGE)
def test_large_rows(rows: int, size: int, dtype: torch.dtype) -> None:
    check(rows, size, dtype, 1e-6)
    check_add(rows, size, dtype, 1e-6)


@pytest.mark.parametrize("rows", [1, 6])
def test_rows_may_lie_apart(rows: int) -> None:
    """As the last token of each request does among all tokens."""
    values, size = Values(rows), 40
    wide = poisoned(rows, 3 * size, dtype=DTYPE)
    x = wide[:, size:2 * size].copy_(values.normal(rows, size, dtype=DTYPE))
    weight = values.normal(size, dtype=DTYPE)
    with unchanged(wide=wide, weight=weight), PoisonedAllocations():
        out = rms_norm(x, weight, 1e-6)
    assert_close(out, exact(x, weight, 1e-6))


@pytest.mark.parametrize("rows", [1, 6])
def test_both_terms_may_lie_apart_at_different_distances(rows: int) -> None:
    values, size = Values(rows), 40
    x = poisoned(rows, 2 * size, dtype=DTYPE)[:, :size].copy_(values.normal(rows, size, dtype=DTYPE))
    wide = poisoned(rows, 3 * size, dtype=DTYPE)
    residual = wide[:, size:2 * size].copy_(values.normal(rows, size, dtype=DTYPE))
    weight, total = values.normal(size, dtype=DTYPE), (x.double() + residual.double()).to(DTYPE)
    with unchanged(before=wide[:, :size], behind=wide[:, 2 * size:], x=x, weight=weight), PoisonedAllocations():
        out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_close(out, exact(total, weight, 1e-6))


def test_zero_and_tiny_rows_are_ruled_by_epsilon() -> None:
    x, weight = torch.full((2, 16), 1e-5, device=DEVICE), torch.ones(16, device=DEVICE)
    x[1] = 0
    out = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-6), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_types_round_where_the_reference_rounds(dtype: torch.dtype) -> None:
    values = Values(3)
    x, residual = values.normal(20, 72, dtype=dtype), values.normal(20, 72, dtype=dtype)
    weight = values.normal(72, dtype=dtype)
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_sum)
    # The mean may be summed in another order: that moves a value across a rounding border once in a great while.
    assert (out != expected).float().mean() < 5e-3
