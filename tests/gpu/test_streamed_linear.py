"""The streamed product against float64.

It is written in Gluon, which has no interpreter: without a GPU it only compiles
(tests/triton/compiling/test_compile.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.products import streamed_config
from sidestep.kernels.products.own_linear import add_own_linear, own_linear
from sidestep.kernels.products.streamed_config import MAX_ROWS, StreamedConfig
from tests.triton.products.test_skinny_linear import check_begun, exact
from tests.triton.support import (
    DTYPE,
    PoisonedAllocations,
    Values,
    assert_close,
    assert_margins_untouched,
    guarded,
    poisoned,
    unchanged,
)

ROWS = [1, 2, 7, 8, 9, 16, 31, 33, MAX_ROWS]
HALF = (torch.bfloat16, torch.float16)
SHAPES = [(64, 64), (1, 128), (100, 136), (192, 1000), (4096, 512), (256, 14336)]


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not is_hopper(torch.device("cuda")):
        pytest.skip("for Hopper")


def configs(rows: int, outputs: int, inputs: int, gated: bool) -> list[StreamedConfig]:
    """Return the shipped configurations, and ones with columns shared by more programs."""
    shipped = streamed_config.config(rows, outputs, inputs, gated)
    return [shipped, StreamedConfig(64, 2, 2), StreamedConfig(64, 3)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_product(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    values, dtype = Values(rows + outputs + inputs), HALF[rows % 2]
    buffer = poisoned(rows, inputs + 16, dtype=dtype)
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
    count = outputs * (1 + gated)
    weight = guarded(values.normal(count, inputs, dtype=dtype, scale=inputs**-0.5))
    bias = None if gated else guarded(values.normal(count, dtype=dtype))
    for config in configs(rows, outputs, inputs, gated):
        with unchanged(x=buffer, weight=weight), PoisonedAllocations():
            out = own_linear(x, weight, bias, gated=gated, config=config)
        assert_close(out, exact(x, weight, bias, gated))
        for _ in range(3):
            assert torch.equal(out, own_linear(x, weight, bias, gated=gated, config=config)), (
                "differs from run to run"
            )


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_addition_begins_the_norm(rows: int, outputs: int, inputs: int) -> None:
    values, dtype = Values(rows + outputs + inputs), HALF[rows % 2]
    x = values.normal(rows, inputs, dtype=dtype)
    weight = guarded(values.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5))
    norm = RmsNorm(guarded(values.normal(outputs, dtype=dtype)), 1e-5)
    for config in configs(rows, outputs, inputs, False):
        whole = poisoned(rows, outputs + 24, dtype=dtype)
        stream = whole[:, :outputs].copy_(values.normal(rows, outputs, dtype=dtype, scale=7))
        expected = exact(x, weight, None, False) + stream.double()
        with unchanged(x=x, weight=weight, between=whole[:, outputs:]), PoisonedAllocations():
            begun = add_own_linear(stream, x, weight, norm=norm, config=config)
        assert_close(stream, expected)
        assert_margins_untouched(whole)
        assert begun is not None
        check_begun(begun, stream, norm, config.block_n)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_shared_out_between_two_products(rows: int, gated: bool) -> None:
    values = Values(rows)
    hidden, inner, outputs = 1000, 512, 192
    stream, x = (
        values.normal(rows, hidden, dtype=DTYPE, scale=7),
        values.normal(rows, inner, dtype=DTYPE),
    )
    first = values.normal(hidden, inner, dtype=DTYPE, scale=inner**-0.5)
    second = values.normal(outputs * (1 + gated), hidden, dtype=DTYPE, scale=hidden**-0.5)
    norm = RmsNorm(values.normal(hidden, dtype=DTYPE), 1e-5)
    begun = add_own_linear(
        stream, x, first, norm=norm, config=streamed_config.config(rows, hidden, inner, False)
    )
    out = own_linear(
        Stream(stream, norm, begun),
        second,
        gated=gated,
        config=streamed_config.config(rows, outputs, hidden, gated),
    )
    assert_close(out, exact(stream, second, None, gated, norm))


@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_does_not_depend_on_those_beside_it(rows: int) -> None:
    """Check that NaN in one row stays there, and that bits do not depend on the number of rows."""
    values = Values(rows)
    x, weight = values.normal(rows + 1, 512, dtype=DTYPE), values.normal(200, 512, dtype=DTYPE)
    config = StreamedConfig(64, 3, 2)

    def product(given: Tensor) -> Tensor:
        return own_linear(given, weight, config=config)

    fewer = product(x[:rows])
    x[rows] = float("nan")
    more = product(x)
    assert torch.equal(more[:rows], fewer)
    assert more[rows].isnan().all()


def test_a_chain_of_kernels_that_start_early_gives_what_they_give_one_by_one() -> None:
    values = Values(1)
    x = values.normal(8, 1024, dtype=DTYPE)
    weights = [values.normal(1024, 1024, dtype=DTYPE, scale=0.03) for _ in range(12)]
    config = streamed_config.config(8, 1024, 1024, False)

    def chain(wait: bool) -> Tensor:
        out = x
        for weight in weights:
            out = own_linear(out, weight, config=config)
            if wait:
                torch.cuda.synchronize()
        return out

    expected = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
