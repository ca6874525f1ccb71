"""Products with few rows against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.rms_norm import RmsNorm
from sidestep.kernels.skinny_linear_triton import MAX_ROWS, SkinnyConfig, choose, skinny_linear
from sidestep.kernels.tuned_products import PRODUCTS
from tests.triton.support import (
    DTYPE,
    DTYPES,
    INTERPRETED,
    PoisonedAllocations,
    Values,
    assert_close,
    assert_margins_untouched,
    guarded,
    needs_gpu,
    poisoned,
    unchanged,
)

SMALL = [SkinnyConfig(block_n=16, block_k=64, num_warps=2, fused_norm=True), SkinnyConfig(8, 128, 2),
         SkinnyConfig(16, 32, 1)]
SMALL_ONE_ROW = SkinnyConfig(block_n=8, block_k=32, num_warps=4, tensor_cores=False)
ROWS = [1, 2, 3, 7, 8, 9, MAX_ROWS]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, norm: RmsNorm | None = None) -> Tensor:
    wide = x.double()
    if norm is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    out = wide @ weight.double().T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out


def check(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, with_bias: bool = False, gated: bool = False,
          apart: int = 0, shipped: bool = False, normed: bool = False, added: bool = False) -> None:
    """With the shipped configuration, or small ones of each kernel. apart: what lies between two rows of x."""
    values = Values(rows + outputs + inputs)
    buffer = poisoned(rows, inputs + apart, dtype=dtype)
    # What is normed may be of any size.
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype, scale=7 if normed else 1))
    norm = RmsNorm(guarded(values.normal(inputs, dtype=dtype)), 1e-5) if normed else None
    count = outputs * (2 if gated else 1)
    # Behind the last row of the weight lies NaN, as it does behind x. Its values make outputs of about 1 in size.
    weight = guarded(values.normal(count, inputs, dtype=dtype, scale=inputs ** -0.5))
    bias = guarded(values.normal(count, dtype=dtype)) if with_bias else None
    others = {"bias": bias} if bias is not None else {}
    others |= {"norm": norm.weight} if norm is not None else {}
    small = SMALL[:2 if normed else 1] if rows > 1 else [SMALL[0], SMALL_ONE_ROW]
    for config in [None] if shipped else small:
        stream = poisoned(rows, outputs + apart, dtype=dtype)
        residual = stream[:, :outputs].copy_(values.normal(rows, outputs, dtype=dtype)) if added else None
        expected = exact(x, weight, bias, gated, norm) + (residual.double() if residual is not None else 0)
        with unchanged(x=buffer, weight=weight, between=stream[:, outputs:], **others), PoisonedAllocations():
            out = skinny_linear(x, weight, bias, norm=norm, gated=gated, residual=residual, config=config)
        assert out.shape == (rows, outputs) and out.dtype == dtype
        assert residual is None or out is residual
        assert_close(out, expected)
        assert_margins_untouched(stream)


# On a GPU the tensor cores would round float32 to 10 bits: it is not what the kernel is for there.
@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_numbers_of_rows(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(rows, 40, 64, dtype, gated=gated)


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_the_normed_input(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(rows, 20, 100, dtype, gated=gated, normed=True, apart=12)


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_added_to_the_residual_stream(rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    check(rows, 20, 100, dtype, with_bias=with_bias, added=True, apart=12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [16, 31, 33, 64, 100])
@pytest.mark.parametrize("outputs", [1, 5, 16, 17])
@pytest.mark.parametrize("rows", [1, 3])
def test_sizes_that_blocks_do_not_divide(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    check(rows, outputs, inputs, DTYPE, gated=gated)


@pytest.mark.parametrize("outputs", [5, 33])
@pytest.mark.parametrize("rows", ROWS)
def test_bias(rows: int, outputs: int) -> None:
    check(rows, outputs, 48, DTYPE, with_bias=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_x_may_lie_apart(rows: int, gated: bool) -> None:
    check(rows, 17, 48, DTYPE, apart=40, gated=gated)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (40, 200)])
def test_the_shipped_choice_of_blocks(rows: int, outputs: int, inputs: int) -> None:
    check(rows, outputs, inputs, DTYPE, shipped=True)


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("rows", [2, 5, 9])
def test_a_row_does_not_depend_on_those_beside_it(rows: int, config: SkinnyConfig) -> None:
    """NaN in one row stays there, and no row's bits change with the number of rows."""
    values = Values(rows)
    x, weight = values.normal(rows + 1, 50, dtype=DTYPE), values.normal(20, 50, dtype=DTYPE)
    fewer = skinny_linear(x[:rows], weight, config=config)
    x[rows] = float("nan")
    more = skinny_linear(x, weight, config=config)
    assert torch.equal(more[:rows], fewer)
    assert more[rows].isnan().all()


# -- The choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_the_tuned_choices_are_such_as_the_kernels_take(shape: tuple[int, int, bool]) -> None:
    for tokens in (1, 2, 8, 9, 16):
        config = choose(tokens, *shape)
        if config is not None:
            assert config.tensor_cores == (tokens > 1), "one row has a kernel of its own"
            assert config.block_n % 8 == 0 or tokens == 1
            assert config.block_k % (32 * config.num_warps) == 0
    assert choose(17, *shape) is None


@pytest.mark.parametrize("gated", [False, True])
def test_matrices_of_unknown_sizes_have_a_choice_by_size(gated: bool) -> None:
    assert choose(1, 5000, 5000, gated) is not None
    assert choose(8, 1000, 1000, gated) is not None
    assert choose(8, 20_000, 8000, gated) is None
    assert choose(16, 3000, 3000, gated) is None


# -- What is too large for the interpreter ----------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [
    (4096, 1024, False), (1024, 3072, False), (3072, 1024, True), (151936, 1024, False), (14336, 4096, True),
    (4096, 14336, False), (4864, 896, True), (1152, 896, False)])
def test_shapes_of_models_as_shipped(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    check(rows, outputs, inputs, DTYPE, gated=gated, shipped=True)
    check(rows, outputs, inputs, DTYPE, gated=gated, shipped=True, normed=True)
    if not gated:
        check(rows, outputs, inputs, DTYPE, shipped=True, added=True)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_weight_of_more_elements_than_31_bits_count(rows: int) -> None:
    weight = torch.zeros(270_000, 8192, dtype=DTYPE, device="cuda")
    weight[-1] = 1
    out = skinny_linear(torch.ones(rows, 8192, dtype=DTYPE, device="cuda"), weight)
    assert bool((out[:, -1] == 8192).all()) and not out[:, :-1].any()
    gated = skinny_linear(torch.ones(rows, 8192, dtype=DTYPE, device="cuda"), weight, gated=True)
    assert not gated.any()
