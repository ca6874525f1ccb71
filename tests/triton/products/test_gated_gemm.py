"""The gated product of many rows against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sidestep.kernels.products import linear as linear_module
from sidestep.kernels.products.gated import gated_gemm_triton
from sidestep.kernels.products.gated.gated_gemm_triton import (
    GatedConfig,
    choose,
    default_config,
    gated_gemm,
)
from sidestep.kernels.products.gated.tuned_gated import GATED
from sidestep.kernels.products.linear import gated_linear
from tests.triton.support import (
    DTYPE,
    DTYPES,
    INTERPRETED,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    needs_gpu,
    poisoned,
    unchanged,
)

WHOLE = GatedConfig(block_m=32, block_n=16, block_k=32, num_warps=2, num_stages=2)
NARROW = GatedConfig(block_m=16, block_n=32, block_k=16, num_warps=1, num_stages=2)
SMALL = [
    WHOLE,
    NARROW,
    dataclasses.replace(WHOLE, bulk=False),
    dataclasses.replace(NARROW, programs=2),
]
ROWS = [17, 31, 32, 33, 64, 70]
SUPPORTED = DTYPES if INTERPRETED else DTYPES[1:]
"""Types of the tests. On a GPU the tensor cores would round float32 to 10 bits.

The kernel is not made for float32 there.
"""


def exact(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def check(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    config: GatedConfig | None,
    *,
    apart: int = 0,
    times: int = 1,
) -> None:
    """Check the product.

    apart: number of elements between two rows of x. times: number of runs, each as right as the
    first.
    """
    values = Values(rows + outputs + inputs)
    # The memory around the input is NaN. The weight's values make outputs of about 1 in size.
    buffer = poisoned(rows, inputs + apart, dtype=dtype)
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
    weight = guarded(values.normal(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5))
    results = []
    for _ in range(times):
        with unchanged(x=buffer, weight=weight), PoisonedAllocations():
            results.append(gated_gemm(x, weight, config=config))
    assert results[0].shape == (rows, outputs) and results[0].dtype == dtype
    assert_close(results[0], exact(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_numbers_of_rows(rows: int, config: GatedConfig, dtype: torch.dtype) -> None:
    check(rows, 80, 96, dtype, config)


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("inputs", [32, 33, 40, 100])
@pytest.mark.parametrize("outputs", [1, 16, 17, 70])
def test_sizes_that_blocks_do_not_divide(outputs: int, inputs: int, config: GatedConfig) -> None:
    check(20, outputs, inputs, DTYPE, config)


@pytest.mark.parametrize("apart", [3, 24])
@pytest.mark.parametrize("config", SMALL[:2], ids=str)
def test_rows_of_x_may_lie_apart(config: GatedConfig, apart: int) -> None:
    check(40, 48, 64, DTYPE, config, apart=apart)


@pytest.mark.parametrize("rows", [20, 100, 130])
def test_the_default_configurations(rows: int) -> None:
    check(rows, 136, 320, DTYPE, default_config(rows))


@pytest.mark.parametrize("config", SMALL, ids=str)
def test_a_row_does_not_depend_on_those_beside_it(config: GatedConfig) -> None:
    values = Values(3)
    x, weight = values.normal(21, 48, dtype=DTYPE), values.normal(2 * 40, 48, dtype=DTYPE)
    alone = gated_gemm(x, weight, config=config)
    x[20] = float("nan")
    beside = gated_gemm(x, weight, config=config)
    assert torch.equal(beside[:20], alone[:20])
    assert beside[20].isnan().all()


@pytest.mark.parametrize("processors", [2, 3, 5, 7, 16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(17, 96, 160), (33, 160, 96), (16, 32, 512), (50, 200, 70)]
)
def test_any_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, inputs: int, processors: int
) -> None:
    """Cover programs with one tile each, several, different numbers of tiles, and none."""
    monkeypatch.setattr(gated_gemm_triton, "num_processors", lambda device: processors)
    check(rows, outputs, inputs, DTYPE, NARROW)


# The choice.


def test_only_what_was_measured_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("meta")
    monkeypatch.setattr(gated_gemm_triton, "has_pdl", lambda device: True)
    monkeypatch.setitem(GATED, (96, 64), ((32, None), (64, dataclasses.astuple(NARROW))))
    assert [choose(rows, 96, 64, device) for rows in (32, 33, 64, 65)] == [
        None,
        NARROW,
        NARROW,
        None,
    ]
    assert choose(64, 96, 65, device) is None
    monkeypatch.setattr(gated_gemm_triton, "has_pdl", lambda device: False)
    assert choose(64, 96, 64, device) is None


@needs_gpu
@pytest.mark.parametrize("rows", [20, 64, 65])
def test_a_layer_takes_what_is_chosen(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    taken = []

    def recorded(x: Tensor, weight: Tensor, *, config: GatedConfig | None = None) -> Tensor:
        taken.append(config)
        return gated_gemm(x, weight, config=config)

    monkeypatch.setattr(gated_gemm_triton, "has_pdl", lambda device: True)
    monkeypatch.setattr(gated_gemm_triton, "gated_gemm", recorded)
    # On Hopper another kernel takes so small a matrix.
    monkeypatch.setattr(linear_module, "_own", lambda *_: None)
    monkeypatch.setitem(GATED, (96, 64), ((64, dataclasses.astuple(NARROW)),))
    x, weight = (
        Values(1).normal(rows, 64, dtype=DTYPE),
        Values(2).normal(192, 64, dtype=DTYPE, scale=0.125),
    )
    assert_close(gated_linear(x, weight, None), exact(x, weight), ulps=8)
    assert taken == ([NARROW] if rows <= 64 else [])


# Sizes that are too large for the interpreter.


@needs_gpu
@pytest.mark.parametrize("rows", [17, 64, 128, 200, 256, 512, 2000])
@pytest.mark.parametrize(("outputs", "inputs"), [(14336, 4096), (3072, 1024), (4864, 896)])
def test_shapes_of_models(rows: int, outputs: int, inputs: int) -> None:
    for config in (default_config(rows), GatedConfig(128, 128, 64, 8, 4)):
        check(rows, outputs, inputs, DTYPE, config, times=2)


@needs_gpu
def test_a_weight_of_more_elements_than_31_bits_count() -> None:
    weight = torch.zeros(2 * 135_000, 8192, dtype=DTYPE, device="cuda")
    weight[134_999] = 0.01
    weight[-1] = 0.01
    for bulk in (True, False):
        out = gated_gemm(
            torch.ones(20, 8192, dtype=DTYPE, device="cuda"),
            weight,
            config=GatedConfig(64, 64, 64, 4, 3, bulk=bulk),
        )
        assert bool((out[:, -1] > 6000).all()) and not out[:, :-1].any()
