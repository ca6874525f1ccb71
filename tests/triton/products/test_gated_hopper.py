"""The gated product of many rows by the kernel for Hopper: its use, and its results."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.products.hopper import gated_hopper
from sidestep.kernels.products.hopper.gated_hopper import gated_product, suits
from sidestep.kernels.products.linear import gated_linear
from tests.triton.products.test_gated_gemm import exact
from tests.triton.support import (
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    needs_hopper,
    poisoned,
    unchanged,
)

HALVES = [torch.bfloat16, torch.float16]
with_compiler = pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


@with_compiler
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "used"),
    [
        (8192, 14336, 4096, True),
        (8448, 14336, 4096, True),
        (2048, 3072, 1024, True),
        (1024, 3072, 1024, False),  # three quarters of the second turn would be filled
        (256, 14336, 4096, False),
        (8192, 3076, 1024, False),
    ],
)
def test_turns_that_are_filled_use_it(rows: int, outputs: int, inputs: int, used: bool) -> None:
    assert suits(numbers(rows, inputs), numbers(2 * outputs, inputs)) == used


@with_compiler
@pytest.mark.usefixtures("h200")
def test_other_numbers_do_not_use_it() -> None:
    x, weight = numbers(8192, 4096), numbers(28672, 4096)
    assert suits(x, weight)
    assert not suits(x.float(), weight.float())
    assert not suits(numbers(8192, 4100)[:, :4096], weight)


def test_other_gpus_do_not_use_it() -> None:
    for capability in (80, 89, 100):
        with like_gpu(Gpu(capability, 132), "meta"):
            assert not suits(numbers(8192, 4096), numbers(28672, 4096))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 8, 8),
        (63, 128, 64),
        (65, 136, 72),
        (129, 1000, 200),
        (257, 256, 4096),
        (700, 384, 1024),
        (2100, 3072, 1024),
        (4500, 1200, 520),
    ],
)
class TestOnHopper:
    pytestmark = needs_hopper

    def test_sizes(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        values = Values(rows + outputs + inputs)
        buffer = poisoned(rows, inputs + 24, dtype=dtype)
        x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
        weight = guarded(values.normal(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5))
        with unchanged(x=buffer, weight=weight), PoisonedAllocations():
            out = gated_product(x, weight)
        assert out.shape == (rows, outputs) and out.dtype == dtype
        assert_close(out, exact(x, weight))
        assert torch.equal(out, gated_product(x, weight))


class TestLayers:
    pytestmark = needs_hopper

    def test_a_layer_uses_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launched = []

        def recorded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            launched.append(x.shape)
            return gated_product(x, weight)

        monkeypatch.setattr(gated_hopper, "gated_product", recorded)
        values = Values(1)
        x = values.normal(2048, 1024, dtype=torch.bfloat16)
        weight = values.normal(6144, 1024, dtype=torch.bfloat16, scale=2**-5)
        assert_close(gated_linear(x, weight, None), exact(x, weight))
        assert launched == [(2048, 1024)]

    def test_a_row_does_not_depend_on_those_beside_it(self) -> None:
        values = Values(3)
        x = values.normal(300, 512, dtype=torch.bfloat16)
        weight = values.normal(512, 512, dtype=torch.bfloat16, scale=0.05)
        alone = gated_product(x, weight)
        x[200] = float("nan")
        beside = gated_product(x, weight)
        assert beside[200].isnan().all()
        assert torch.equal(beside[:200], alone[:200]) and torch.equal(beside[201:], alone[201:])

    def test_a_weight_of_more_bytes_than_31_bits_count(self) -> None:
        weight = torch.zeros(2 * 136_000, 8192, dtype=torch.bfloat16, device="cuda")
        weight[135_999] = 0.01
        weight[-1] = 0.01
        out = gated_product(torch.ones(130, 8192, dtype=torch.bfloat16, device="cuda"), weight)
        assert bool((out[:, -1] > 6000).all()) and not out[:, :-1].any()
