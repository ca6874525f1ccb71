"""Codes of keys and values: their bounds of error, and heads of all kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops.kv_quantization import CodeFormat, dequantize, quantize

FORMATS: tuple[CodeFormat, ...] = ("fp8", "int8", "int4")
RMS = {"fp8": 0.03, "int8": 0.009, "int4": 0.13}
"""Bounds on the relative error of normal numbers, heads of 64."""


def read(x: Tensor, code_format: CodeFormat) -> Tensor:
    codes, numbers = quantize(x, code_format)
    assert numbers.dtype == torch.float16
    assert codes.shape[-1] == x.shape[-1] // (2 if code_format == "int4" else 1)
    return dequantize(codes, numbers, code_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("code_format", FORMATS)
def test_the_error_has_a_bound(code_format: CodeFormat, factor: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(200, 4, 64) * factor).to(dtype)
    exact, made = x.double(), read(x, code_format).double()
    error, top = (made - exact).abs(), exact.abs().amax(-1, keepdim=True)
    # Half a step; the codes of scales that are subnormal numbers of float16 are a bit coarser.
    if code_format == "int8":
        assert (error <= top / 127 / 2 * 1.002 + 4e-8).all()
    elif code_format == "fp8":
        assert (error <= exact.abs() / 16 * 1.001 + top / 448 / 1024 * 1.01 + 4e-8).all()
    else:
        # The rounded zero may cost the largest and the smallest another half step.
        span = exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)
        assert (error <= span / 15 * 1.002 + 7e-8).all()
    assert error.square().mean().sqrt() < RMS[code_format] * exact.square().mean().sqrt()


@pytest.mark.parametrize("code_format", FORMATS)
def test_what_was_read_is_stored_again_without_error(code_format: CodeFormat) -> None:
    torch.manual_seed(1)
    once = read(torch.randn(50, 2, 32), code_format)
    if code_format != "int4":
        torch.testing.assert_close(read(once, code_format), once, rtol=2e-3, atol=0)
    assert read(once, code_format).sub(once).abs().max() <= once.abs().max() / 7


@pytest.mark.parametrize("code_format", FORMATS)
def test_heads_of_zeros_and_the_largest_numbers_stay_finite(code_format: CodeFormat) -> None:
    x = torch.zeros(5, 1, 8)
    x[1, 0, 3], x[2, 0, 5], x[3], x[4, 0, 0] = 3e38, -3e38, 1e-12, 65504.0
    made = read(x, code_format)
    assert made.isfinite().all() and not made[0].any()
    assert made[3].abs().max() < 1e-4
    torch.testing.assert_close(made[4], x[4], rtol=1e-3, atol=0)


@pytest.mark.parametrize("code_format", FORMATS)
def test_a_token_is_stored_alike_whatever_is_beside_it(code_format: CodeFormat) -> None:
    torch.manual_seed(2)
    x = torch.randn(33, 2, 24)
    codes, numbers = quantize(x, code_format)
    for token in (0, 7, 32):
        own, scale = quantize(x[token : token + 1], code_format)
        assert torch.equal(own.view(torch.uint8)[0], codes.view(torch.uint8)[token])
        assert torch.equal(scale[0], numbers[token])
