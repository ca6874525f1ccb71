"""Products with few rows against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.products.own_linear import (
    Config,
    add_own_linear,
    choose,
    own_linear,
)
from sidestep.kernels.products.skinny_linear_triton import MAX_ROWS, SkinnyConfig, skinny_config
from sidestep.kernels.products.streamed_config import StreamedConfig
from sidestep.kernels.products.tuned.tuned_products import PRODUCTS
from sidestep.kernels.products.tuned.tuned_products import ROWS as TUNED_ROWS
from sidestep.kernels.products.tuned.tuned_steps import STREAMED_ALONE
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

SMALL = [
    SkinnyConfig(block_n=16, block_k=64, num_warps=2),
    SkinnyConfig(8, 128, 2),
    SkinnyConfig(16, 32, 1),
]
SMALL_ONE_ROW = SkinnyConfig(block_n=8, block_k=32, num_warps=4, tensor_cores=False)
ROWS = [1, 2, 3, 7, 8, 9, MAX_ROWS]


def shipped_config(x: Tensor, weight: Tensor, gated: bool) -> Config:
    """Return the shipped configuration of these sizes.

    Where the library's product is chosen, return the one that they could have.
    """
    sizes = weight.shape[0] // (1 + gated), weight.shape[1], gated
    return choose(x.shape[0], *sizes, hopper=is_hopper(x.device)) or skinny_config(*sizes)


def skinny_linear(
    x: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    config: Config | None = None,
) -> Tensor:
    hidden = x.hidden if isinstance(x, Stream) else x
    return own_linear(
        x, weight, bias, gated=gated, config=config or shipped_config(hidden, weight, gated)
    )


def add_skinny_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RmsNorm | None = None,
    config: Config | None = None,
) -> BegunNorm | None:
    return add_own_linear(
        residual, x, weight, bias, norm=norm, config=config or shipped_config(x, weight, False)
    )


def exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, norm: RmsNorm | None = None
) -> Tensor:
    wide = x.double()
    if norm is not None:
        wide = (
            wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        )
    out = wide @ weight.double().T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out


def small_configs(rows: int) -> list[SkinnyConfig | None]:
    """Return one configuration of each kernel that takes that number of rows."""
    return [SMALL[0], SMALL_ONE_ROW] if rows == 1 else [SMALL[0]]


def check(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    with_bias: bool = False,
    gated: bool = False,
    apart: int = 0,
    shipped: bool = False,
) -> None:
    """Check the product with the shipped configuration, or small ones of each kernel.

    apart: number of elements between two rows of x.
    """
    values = Values(rows + outputs + inputs)
    buffer = poisoned(rows, inputs + apart, dtype=dtype)
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
    count = outputs * (2 if gated else 1)
    # NaN lies behind the last row of the weight, as it does behind x. Its values make outputs of
    # about 1 in size.
    weight = guarded(values.normal(count, inputs, dtype=dtype, scale=inputs**-0.5))
    bias = guarded(values.normal(count, dtype=dtype)) if with_bias else None
    others = {"bias": bias} if bias is not None else {}
    for config in [None] if shipped else small_configs(rows):
        with unchanged(x=buffer, weight=weight, **others), PoisonedAllocations():
            out = skinny_linear(x, weight, bias, gated=gated, config=config)
        assert out.shape == (rows, outputs) and out.dtype == dtype
        assert_close(out, exact(x, weight, bias, gated))


def check_added(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    with_bias: bool = False,
    normed: bool = False,
    apart: int = 0,
    shipped: bool = False,
) -> None:
    """Check the sum into the residual stream, and the begun norm.

    apart: number of elements between two rows of either side.
    """
    values = Values(rows + outputs + inputs)
    buffer = poisoned(rows, inputs + apart, dtype=dtype)
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
    weight = guarded(values.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5))
    bias = guarded(values.normal(outputs, dtype=dtype)) if with_bias else None
    norm = RmsNorm(guarded(values.normal(outputs, dtype=dtype)), 1e-5) if normed else None
    others = {"bias": bias} if bias is not None else {}
    others |= {"norm": norm.weight} if norm is not None else {}
    for config in [None] if shipped else small_configs(rows):
        whole = poisoned(rows, outputs + apart, dtype=dtype)
        stream = whole[:, :outputs].copy_(values.normal(rows, outputs, dtype=dtype, scale=7))
        expected = exact(x, weight, bias, False) + stream.double()
        with (
            unchanged(x=buffer, weight=weight, between=whole[:, outputs:], **others),
            PoisonedAllocations(),
        ):
            begun = add_skinny_linear(stream, x, weight, bias, norm=norm, config=config)
        assert_close(stream, expected)
        assert_margins_untouched(whole)
        assert (begun is None) == (norm is None)
        if begun is not None and norm is not None:
            check_begun(begun, stream, norm, (config or shipped_config(x, weight, False)).block_n)


def check_begun(begun: BegunNorm, stream: Tensor, norm: RmsNorm, block: int) -> None:
    """Check a begun norm against the rounded stream. block: number of columns of a program."""
    weighted, squares = begun
    assert weighted.shape == stream.shape and weighted.dtype == stream.dtype
    assert_close(weighted, stream.double() * norm.weight.double(), 1)
    assert squares.dtype == torch.float32
    exact_squares = [part.square().sum(1) for part in stream.double().split(block, 1)]
    assert_close(squares, torch.stack(exact_squares, 1))


def check_scaled(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    parts: int,
    gated: bool = False,
    with_bias: bool = False,
) -> None:
    """Check the product of a stream whose norm was begun.

    The sum of a row's squares has the given number of parts.
    """
    values = Values(rows + outputs + inputs + parts)
    weighted = guarded(values.normal(rows, inputs, dtype=dtype, scale=7))
    squares = guarded(
        values.normal(rows, parts, dtype=torch.float32, scale=(49 * inputs / parts) ** 0.5).square()
    )
    norm = RmsNorm(poisoned(inputs, dtype=dtype), 1e-5)
    count = outputs * (2 if gated else 1)
    weight = guarded(values.normal(count, inputs, dtype=dtype, scale=inputs**-0.5))
    bias = guarded(values.normal(count, dtype=dtype)) if with_bias else None
    # The kernel reads neither the stream itself nor the norm's weight again.
    stream = Stream(poisoned(rows, inputs, dtype=dtype), norm, BegunNorm(weighted, squares))
    scale = (squares.double().sum(1, keepdim=True) / inputs + norm.eps).rsqrt()
    expected = exact(weighted.double() * scale, weight, bias, gated)
    for config in small_configs(rows):
        with unchanged(weighted=weighted, squares=squares, weight=weight), PoisonedAllocations():
            out = skinny_linear(stream, weight, bias, gated=gated, config=config)
        assert_close(out, expected)


def check_chain(
    rows: int,
    hidden: int,
    inner: int,
    outputs: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    shipped: bool = False,
) -> None:
    """Check a product that begins a norm and the next one against a whole norm between."""
    values = Values(rows + hidden + inner)
    stream, x = (
        values.normal(rows, hidden, dtype=dtype, scale=7),
        values.normal(rows, inner, dtype=dtype),
    )
    first = guarded(values.normal(hidden, inner, dtype=dtype, scale=inner**-0.5))
    second = guarded(values.normal(outputs * (1 + gated), hidden, dtype=dtype, scale=hidden**-0.5))
    norm = RmsNorm(guarded(values.normal(hidden, dtype=dtype)), 1e-5)
    kinds = [None] if shipped else small_configs(rows)
    for config, other in zip(kinds, reversed(kinds), strict=True):
        added = guarded(stream)
        with PoisonedAllocations():
            begun = add_skinny_linear(added, x, first, norm=norm, config=config)
            out = skinny_linear(Stream(added, norm, begun), second, gated=gated, config=other)
        assert begun is not None
        assert_close(out, exact(added, second, None, gated, norm))


# On a GPU the tensor cores would round float32 to 10 bits: the kernel is not made for float32
# there.
@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_numbers_of_rows(rows: int, gated: bool, dtype: torch.dtype) -> None:
    check(rows, 40, 64, dtype, gated=gated)


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_added_to_the_residual_stream(
    rows: int, with_bias: bool, dtype: torch.dtype
) -> None:
    check_added(rows, 20, 100, dtype, with_bias=with_bias, apart=12)


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
    """Check that NaN in one row stays there, and that bits do not depend on the number of rows."""
    values = Values(rows)
    x, weight = values.normal(rows + 1, 50, dtype=DTYPE), values.normal(20, 50, dtype=DTYPE)
    fewer = skinny_linear(x[:rows], weight, config=config)
    x[rows] = float("nan")
    more = skinny_linear(x, weight, config=config)
    assert torch.equal(more[:rows], fewer)
    assert more[rows].isnan().all()


# Norms shared out between two products.


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("outputs", [1, 16, 20, 33])
@pytest.mark.parametrize("rows", ROWS)
def test_the_first_product_begins_the_norm(rows: int, outputs: int, dtype: torch.dtype) -> None:
    check_added(rows, outputs, 100, dtype, normed=True, with_bias=outputs == 20, apart=12)


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("parts", [1, 3, 8, 37])
@pytest.mark.parametrize("rows", ROWS)
def test_the_second_product_applies_the_scale(rows: int, parts: int, dtype: torch.dtype) -> None:
    check_scaled(rows, 20, 100, dtype, parts=parts, with_bias=True)


@pytest.mark.parametrize("inputs", [31, 64, 100])
@pytest.mark.parametrize("outputs", [5, 16, 17])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_the_scale_comes_before_the_gated_activation(rows: int, outputs: int, inputs: int) -> None:
    check_scaled(rows, outputs, inputs, DTYPE, parts=6, gated=True)


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_both_products_equal_those_with_the_norm_between_them(
    rows: int, gated: bool, dtype: torch.dtype
) -> None:
    check_chain(rows, 50, 40, 20, dtype, gated=gated)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_that_was_not_begun_is_done_before_the_product(rows: int) -> None:
    values = Values(rows)
    hidden, weight = (
        values.normal(rows, 50, dtype=DTYPE, scale=7),
        values.normal(20, 50, dtype=DTYPE, scale=0.1),
    )
    norm = RmsNorm(values.normal(50, dtype=DTYPE), 1e-5)
    for config in small_configs(rows):
        out = skinny_linear(Stream(hidden, norm), weight, config=config)
        assert_close(out, exact(hidden, weight, None, False, norm))


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("rows", [2, 5, 9])
def test_no_row_changes_the_norm_of_another(rows: int, config: SkinnyConfig) -> None:
    """Check that NaN in one row stays there, and that bits do not depend on the number of rows."""
    values = Values(rows)
    stream, x = values.normal(rows + 1, 50, dtype=DTYPE), values.normal(rows + 1, 40, dtype=DTYPE)
    first, second = values.normal(50, 40, dtype=DTYPE), values.normal(20, 50, dtype=DTYPE)
    norm = RmsNorm(values.normal(50, dtype=DTYPE), 1e-5)
    x[rows] = float("nan")

    def chain(count: int) -> Tensor:
        added = stream[:count].clone()
        begun = add_skinny_linear(added, x[:count], first, norm=norm, config=config)
        return skinny_linear(Stream(added, norm, begun), second, config=config)

    more = chain(rows + 1)
    assert torch.equal(more[:rows], chain(rows))
    assert more[rows].isnan().all()


# The choice.


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_the_tuned_choices_are_such_as_the_kernels_take(shape: tuple[int, int, bool]) -> None:
    assert len(PRODUCTS[shape]) == len(TUNED_ROWS)
    for tokens in (1, 2, 8, 9, 16, 17, 33, 64):
        config = choose(tokens, *shape, hopper=True)
        if isinstance(config, SkinnyConfig):
            assert tokens <= MAX_ROWS
            assert config.tensor_cores == (tokens > 1), "one row has a kernel of its own"
            assert config.block_n % 8 == 0 or tokens == 1
            assert config.block_k % (32 * config.num_warps) == 0
    assert choose(TUNED_ROWS[-1] + 1, *shape, hopper=True) is None


@pytest.mark.parametrize("shape", STREAMED_ALONE, ids=str)
def test_one_row_that_is_streamed_has_the_bits_of_several(shape: tuple[int, int, bool]) -> None:
    alone, several = (choose(tokens, *shape, hopper=True) for tokens in (1, 8))
    assert isinstance(alone, StreamedConfig)
    assert alone == several, "rows of x are filled up to eight, and sums have the same order"
    assert not isinstance(choose(1, *shape, hopper=False), StreamedConfig)


@pytest.mark.parametrize("gated", [False, True])
def test_matrices_of_unknown_sizes_have_a_choice_by_size(gated: bool) -> None:
    assert choose(1, 5000, 5000, gated, hopper=False) is not None
    assert choose(8, 1000, 1000, gated, hopper=False) is not None
    assert choose(8, 20_000, 8000, gated, hopper=False) is None
    assert choose(16, 3000, 3000, gated, hopper=False) is None
    assert isinstance(choose(16, 3000, 3000, gated, hopper=True), StreamedConfig)
    assert isinstance(choose(8, 20_000, 8000, gated, hopper=True), StreamedConfig)
    assert not isinstance(choose(16, 3000, 3001, gated, hopper=True), StreamedConfig), (
        "rows that are not aligned"
    )


# Sizes that are too large for the interpreter.


@needs_gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (4096, 1024, False),
        (1024, 3072, False),
        (3072, 1024, True),
        (151936, 1024, False),
        (14336, 4096, True),
        (4096, 14336, False),
        (4864, 896, True),
        (1152, 896, False),
    ],
)
def test_shapes_of_models_as_shipped(rows: int, outputs: int, inputs: int, gated: bool) -> None:
    check(rows, outputs, inputs, DTYPE, gated=gated, shipped=True)
    if not gated:
        check_added(rows, outputs, inputs, DTYPE, shipped=True, normed=True)


@needs_gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("hidden", "inner", "outputs", "gated"),
    [
        (1024, 3072, 4096, False),
        (1024, 2048, 3072, True),
        (4096, 14336, 6144, False),
        (4096, 4096, 14336, True),
        (896, 4864, 1152, False),
    ],
)
def test_norms_between_products_of_models_as_shipped(
    rows: int, hidden: int, inner: int, outputs: int, gated: bool
) -> None:
    check_chain(rows, hidden, inner, outputs, DTYPE, gated=gated, shipped=True)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_weight_of_more_elements_than_31_bits_count(rows: int) -> None:
    weight = torch.zeros(270_000, 8192, dtype=DTYPE, device="cuda")
    weight[-1] = 1
    out = skinny_linear(torch.ones(rows, 8192, dtype=DTYPE, device="cuda"), weight)
    assert bool((out[:, -1] == 8192).all()) and not out[:, :-1].any()
    gated = skinny_linear(torch.ones(rows, 8192, dtype=DTYPE, device="cuda"), weight, gated=True)
    assert not gated.any()
