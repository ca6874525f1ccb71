"""RMSNorm against float64, and against the order of roundings that models are trained with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops.rms_norm import rms_norm


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 7), (3, 48), (5, 1), (2, 3, 80), (257, 60)])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_float32_is_close_to_exact(shape: tuple[int, ...], eps: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3, torch.rand(shape[-1]) + 0.5
    torch.testing.assert_close(
        rms_norm(x, weight, eps).double(), exact(x, weight, eps), rtol=1e-5, atol=1e-6
    )


def test_tiny_and_zero_rows_are_ruled_by_epsilon() -> None:
    x, weight = torch.full((2, 16), 1e-5), torch.ones(16)
    x[1] = 0
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6).double(), exact(x, weight, 1e-6), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_before_the_weight_as_transformers_does(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(65, 72).to(dtype), (torch.rand(72) + 0.5).to(dtype)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    # The mean may be summed in another order: that rarely moves a value across a rounding border.
    assert (got != expected).float().mean() < 2e-3
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=1e-3)


def test_a_strided_view_of_heads_is_normalised_head_by_head() -> None:
    torch.manual_seed(2)
    qkv, weight = torch.randn(5, 8, 12), torch.rand(12)
    torch.testing.assert_close(
        rms_norm(qkv[:, 2:6], weight, 1e-6), rms_norm(qkv[:, 2:6].contiguous(), weight, 1e-6)
    )


def test_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(64, 96), torch.rand(96)
    whole = rms_norm(x, weight, 1e-6)
    for row in (0, 31, 63):
        torch.testing.assert_close(
            rms_norm(x[row : row + 1], weight, 1e-6), whole[row : row + 1], rtol=1e-6, atol=1e-6
        )
