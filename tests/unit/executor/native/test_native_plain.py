"""Products with plain matrices by the kernel in C, with vectors of 512 and of 256 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestep.executor.layers.layouts import native_layouts, native_matrices
from sidestep.executor.layers.layouts.native_layouts import native_plain
from sidestep.executor.layers.layouts.native_matrices import Kernel, kernel_of
from sidestep.kernels.native.library import NoLibraryError
from sidestep.kernels.native.packing import exact_type

SHAPES = [(1, 1), (31, 7), (64, 1024), (1000, 192), (70, 4100)]


def product_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    made = native_plain(weight)
    if made is None:
        pytest.skip("there is no compiler, or the CPU has no such vectors")
    return made[0]


@pytest.fixture(autouse=True, params=["as wide as they are", "of 256 bits"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layouts, "_FEWEST_NUMBERS", 1)
    if request.param != "of 256 bits":
        return

    def narrow(source: str, name: str, dtype: torch.dtype) -> Kernel | None:
        found = kernel_of(source, name, dtype, "NARROW")
        assert found is None or found.tile == 16
        return found

    monkeypatch.setattr(native_layouts, "kernel_of", narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    product = product_of(weight)
    for rows in (0, 1, 3, 8, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        made, expected = product(x), x.double() @ weight.double().T
        assert made.dtype == dtype and made.is_contiguous() and made.shape == expected.shape
        size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
        tolerance = max(torch.finfo(dtype).eps, 2e-6)
        assert ((made.double() - expected).abs() <= tolerance * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_alone_among_others_and_apart(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    product, threads = product_of(torch.randn(shape).to(dtype)), torch.get_num_threads()
    x = torch.randn(90, shape[1] + 3).to(dtype)[:, 2:-1]
    together = product(x)
    try:
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 63, 89):
            torch.set_num_threads(1 + rows % 3)
            assert torch.equal(product(x[90 - rows :]), together[90 - rows :]), f"{rows} rows"
    finally:
        torch.set_num_threads(threads)


KEPT = {torch.bfloat16: 1.0, torch.float16: 2.0**-20}
"""Types of files, and the size of their numbers: the second one has some that are subnormal."""


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_of_a_file_in_16_bits_keeps_them_and_gives_the_same_bits(
    shape: tuple[int, int], kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = (torch.randn(shape) * KEPT[kept]).to(kept).float()
    # One number that the other type of 16 bits does not have.
    weight[0, 0] = 2.0**100 if kept == torch.bfloat16 else 1 + 2.0**-10
    made = native_plain(weight)
    if made is None:
        pytest.skip("there is no compiler, or the CPU has no such vectors")
    assert isinstance(made[1], tuple)
    assert [one.dtype for one in made[1] if isinstance(one, Tensor)] == [kept]
    monkeypatch.setattr(native_matrices, "exact_type", lambda numbers: numbers.dtype)
    wide = product_of(weight)
    for rows in (1, 2, 3, 8, 9, 70, 300):
        x = torch.randn(rows, shape[1])
        assert torch.equal(made[0](x), wide(x)), f"{rows} rows"


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("lost", [1 + 2.0**-20, 2.0**-140 * 1.5, 2.0**17 + 1])
@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_that_would_lose_a_number_stays_in_32_bits(
    lost: float, kept: torch.dtype, turned: bool
) -> None:
    product_of(torch.ones(4, 4))  # there is a compiler
    weight = (torch.rand(300, 43) + 1).to(kept).float()
    weight = weight.T if turned else weight
    assert exact_type(weight) == kept
    weight[-1, -1] = lost
    assert exact_type(weight) == torch.float32
    assert exact_type(weight.half()) == torch.float16


def test_numbers_that_are_not_finite_stay_in_their_row_and_column() -> None:
    weight, x = torch.randn(40, 50), torch.randn(9, 50)
    weight[33, 4], x[2, 3] = torch.nan, torch.inf
    finite = product_of(weight)(x).isfinite()
    assert not finite[2].any() and not finite[:, 33].any()
    finite[2], finite[:, 33] = True, True
    assert finite.all()


def test_small_matrices_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_layouts, "_FEWEST_NUMBERS", 101)
    assert native_plain(torch.ones(10, 10)) is None
    product_of(torch.ones(10, 11))


def test_another_type_has_no_such_product() -> None:
    assert native_plain(torch.ones(4, 4, dtype=torch.float16)) is None


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def library_of(*_: Any) -> Any:
        raise NoLibraryError("none")

    monkeypatch.setattr(native_matrices, "library_of", library_of)
    assert native_plain(torch.ones(4, 4)) is None
