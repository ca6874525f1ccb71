"""The gated activation in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops import silu_mul as reference
from sidestep.kernels.triton.sigmoid_mul_triton import sigmoid_mul
from sidestep.kernels.triton.silu_mul_triton import silu_mul
from tests.triton.support import (
    DEVICE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    needs_gpu,
    poisoned,
    unchanged,
)


def check(gate_up: Tensor) -> None:
    gate_up = guarded(gate_up)
    with unchanged(gate_up=gate_up), PoisonedAllocations():
        out = silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert out.shape == gate.shape and out.dtype == gate_up.dtype
    assert_close(out, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (1, 5), (4, 16), (3, 33), (2, 1023), (2, 1025), (1, 2600), (9, 96)]
)
def test_any_size(rows: int, size: int, dtype: torch.dtype) -> None:
    check(Values(rows * size).normal(rows, 2 * size, dtype=dtype, scale=2))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 14336), (513, 3072), (8, 18944)])
def test_large_rows(rows: int, size: int, dtype: torch.dtype) -> None:
    check(Values(rows * size).normal(rows, 2 * size, dtype=dtype, scale=2))


def test_gates_far_from_zero() -> None:
    gate = torch.tensor([[-80.0, -20.0, -0.0, 0.0, 20.0, 1000.0]], device=DEVICE)
    check(torch.cat([gate, torch.full_like(gate, 1.5)], -1))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_types_round_where_the_reference_rounds(dtype: torch.dtype) -> None:
    gate_up = Values(5).normal(10, 2 * 90, dtype=dtype, scale=2)
    # The exponential may differ in its last bit, which rarely moves a value across a rounding
    # border.
    assert (silu_mul(gate_up) != reference.silu_mul(gate_up)).float().mean() < 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 40), (2, 513)])
def test_the_gate_of_attention(rows: int, size: int, dtype: torch.dtype) -> None:
    values = Values(rows * size)
    x = guarded(values.normal(rows, size, dtype=dtype))
    gate = poisoned(rows, size + 9, dtype=dtype)[:, 5:-4]
    gate.copy_(values.normal(rows, size, dtype=dtype, scale=3))
    expected = x.double() * gate.double().sigmoid()
    with unchanged(gate=gate), PoisonedAllocations():
        sigmoid_mul(x, gate)
    assert_close(x, expected)
