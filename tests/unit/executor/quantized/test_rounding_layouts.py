"""Products that round their inputs to 8 bits on a CPU: near, exact where they can be, independent.

A CPU without such products passes over the layout, and its tests with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestep.executor.layers import cpu_product, vocab
from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.layers.layouts import native_layouts, rounding_layouts
from sidestep.executor.layers.layouts.layout import operator
from sidestep.executor.layers.layouts.native_layouts import CODED, takes
from sidestep.executor.layers.layouts.native_matrices import Kernel, kernel_of
from sidestep.executor.layers.layouts.rounding_layouts import LARGEST, eights, may_round
from sidestep.executor.layers.vocab import rounded_head
from sidestep.executor.models.weight_memory import weight_bytes
from sidestep.executor.quantization.encode import encode
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.online import ONLINE
from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, Codes, pack_halves

ROWS, COLUMNS = 520, 1100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def narrow_kernel(source: str, name: str, dtype: torch.dtype) -> Kernel | None:
    """Return a kernel for vectors of 256 bits, also where this CPU has wider ones."""
    found = kernel_of(source, name, dtype, "NARROW")
    assert found is None or found.tile == 8
    return found


@pytest.fixture(autouse=True, params=["native", "native of 8 lanes", "eights"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Leave a quantized matrix one layout."""
    name: str = request.param.split()[0]
    if name != request.param:
        monkeypatch.setattr(native_layouts, "kernel_of", narrow_kernel)
    usual = cpu_product._candidates

    def candidates(matrix: Tensor | CodedMatrix) -> Iterator[str]:
        return iter([name]) if isinstance(matrix, CodedMatrix) else usual(matrix)

    monkeypatch.setattr(cpu_product, "_chosen", {})
    monkeypatch.setattr(cpu_product, "_candidates", candidates)
    return name


def coded(
    kind: Codes, width: int, dtype: torch.dtype = torch.float32, *, minimums: bool = False
) -> CodedMatrix:
    """Return a matrix of random codes that is large enough. width: columns that share a scale."""
    torch.manual_seed(0)
    if kind == "int8":
        codes = torch.randint(-LARGEST, LARGEST + 1, (ROWS, COLUMNS), dtype=torch.int8)
    elif kind == "fp8":
        codes = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    else:
        codes = pack_halves(torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8))
    scales = torch.rand(ROWS, -(-COLUMNS // width)) + 0.5
    return CodedMatrix(
        kind=kind,
        codes=codes,
        scales=scales,
        group=(1, width),
        dtype=dtype,
        zeros=torch.randint(0, 16, scales.shape, dtype=torch.uint8) if kind == "int4" else None,
        minimums=torch.rand(scales.shape) if minimums else None,
    )


def product_of(matrix: CodedMatrix) -> CpuProduct:
    """Return the product; skip the test where this CPU does not have the layout."""
    (name,) = cpu_product._candidates(matrix)
    if name == "native" and kernel_of(CODED, "product", matrix.dtype) is None:
        pytest.skip("this machine has no such kernel")
    if name == "eights" and eights(coded("int8", COLUMNS)) is None:
        pytest.skip("this CPU has no such product")
    product = CpuProduct(matrix)
    assert product.kind == name
    return product


FORMS: list[tuple[Codes, int]] = [("int8", COLUMNS), ("int8", 32), ("fp8", COLUMNS), ("nf4", 64)]
KEPT: list[tuple[Codes, int]] = [
    ("int8", 64),
    ("int4", 32),
    ("int4", 128),
    ("int4", 512),
    ("int4", COLUMNS),
    ("fp4", 32),
    ("nf4", 64),
]
"""Forms whose codes the kernel in C keeps."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "width"), FORMS)
def test_errors_are_those_of_8_bits(kind: Codes, width: int, dtype: torch.dtype) -> None:
    matrix = coded(kind, width, dtype)
    product, numbers = product_of(matrix), matrix.decoded(torch.float64)
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, COLUMNS).to(dtype)
        made, expected = product(x), x.double() @ numbers.T
        assert made.dtype == dtype and made.is_contiguous() and made.shape == (rows, ROWS)
        error = torch.linalg.vector_norm(made.double() - expected)
        assert error <= 0.02 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "width"), FORMS)
def test_a_row_has_the_same_bits_alone_and_among_others(
    kind: Codes, width: int, dtype: torch.dtype
) -> None:
    product = product_of(coded(kind, width, dtype))
    # Rows of very different sizes: a scale of all of them would lose the small ones.
    sizes = 10.0 ** (torch.arange(300) % 7 - 3)[:, None]
    x = (torch.randn(300, COLUMNS + 1) * sizes).to(dtype)[:, 1:]
    together = product(x)
    for rows in (1, 2, 3, 4, 5, 8, 17, 64, 131, 299):
        assert torch.equal(product(x[300 - rows :]), together[300 - rows :]), f"{rows} rows"


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("kind", "width"), KEPT)
def test_codes_are_kept(
    kind: Codes, width: int, dtype: torch.dtype, minimums: bool, layout: str
) -> None:
    """Compare with the exact product of inputs that are whole numbers, which rounding keeps."""
    if layout != "native":
        pytest.skip("it keeps codes with one scale a row alone")
    matrix = coded(kind, width, dtype, minimums=minimums)
    matrix.scales[:3] *= 1e-6
    matrix.scales[7] = 0
    product, numbers = product_of(matrix), matrix.decoded(torch.float64)
    x = torch.randint(-LARGEST, LARGEST + 1, (9, COLUMNS))
    x[:, ::32] = LARGEST  # so that steps are of 1
    made, expected = product(x.to(dtype)), x.double() @ numbers.T
    size = x.double().norm(dim=1)[:, None] * numbers.norm(dim=1)
    tolerance = max(torch.finfo(dtype).eps, 2**-10)
    assert ((made.double() - expected).abs() <= tolerance * size).all()


def test_whole_numbers_are_multiplied_exactly() -> None:
    matrix = coded("int8", COLUMNS)
    matrix.scales.fill_(1)
    product = product_of(matrix)
    x = torch.randint(-LARGEST, LARGEST + 1, (9, COLUMNS)).float()
    x[:, ::32] = LARGEST
    torch.testing.assert_close(product(x), x @ matrix.codes.float().T, rtol=1e-6, atol=1e-2)


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    product = product_of(coded("int8", COLUMNS))
    x = torch.zeros(4, COLUMNS)
    x[1, 3], x[2, 5], x[3, 7] = torch.nan, torch.inf, 1.0
    made = product(x)
    assert torch.equal(made[0], torch.zeros(ROWS))
    assert not made[1:3].isfinite().any() and made[3].isfinite().all()


def test_rows_of_a_matrix_may_be_zero() -> None:
    matrix = coded("nf4", 64)
    matrix.scales[:4] = 0
    product = product_of(matrix)
    made = product(torch.randn(3, COLUMNS))
    assert not made[:, :4].any() and made.isfinite().all()


def test_a_new_thread_may_begin_with_no_rows() -> None:
    product, made = product_of(coded("int8", COLUMNS)), []
    thread = threading.Thread(target=lambda: made.append(product(torch.empty(0, COLUMNS))))
    thread.start()
    thread.join()
    assert made[0].shape == (0, ROWS)


def test_the_memory_is_a_byte_a_number() -> None:
    product = product_of(coded("fp8", 64))
    assert 1 <= weight_bytes(product) / (ROWS * COLUMNS) <= 1.04


def test_a_matrix_that_would_lose_too_much_is_not_rounded_again() -> None:
    matrix = coded("nf4", 100)
    assert may_round(matrix) and takes(matrix)
    matrix.scales[:, 0] *= 100
    assert not may_round(matrix) and not takes(matrix)


def test_a_cpu_that_cuts_sums_off_has_no_such_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave like a CPU that adds pairs of products in 16 bits."""

    def cut_off(namespace: str, name: str) -> Callable[..., Any] | None:
        found = operator(namespace, name)
        if found is None or name == "linear_prepack":
            return found

        def multiply(x: Tensor, *arguments: Any) -> Tensor:
            made: Tensor = found(x, *arguments)
            return made.clamp_(max=COLUMNS)

        return multiply

    monkeypatch.setattr(rounding_layouts, "operator", cut_off)
    assert eights(coded("int8", COLUMNS)) is None


def test_a_large_plain_head_on_a_cpu_is_rounded() -> None:
    plain = torch.randn(ROWS, COLUMNS)
    head = rounded_head(plain, ONLINE["fp8"])
    assert isinstance(head, CodedMatrix) and head.kind == "int8"
    error = torch.linalg.vector_norm(head.decoded(torch.float32) - plain)
    assert error <= 0.02 * torch.linalg.vector_norm(plain)


def test_small_heads_and_those_without_memory_stay_as_they_are() -> None:
    for head in (torch.randn(257, 60), torch.empty(ROWS, COLUMNS, device="meta")):
        assert rounded_head(head, ONLINE["int8"]) is head


@pytest.mark.parametrize("choice", ["fp8", "int8"])
def test_a_gpu_rounds_any_head_some_rows_at_a_time(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab, "_ROUNDED_AT_ONCE", 100)
    plain = torch.randn(257, 64)
    with like_gpu(Gpu(90, 132), "cpu"):
        head = rounded_head(plain, ONLINE[choice])
    whole = encode(plain, ONLINE[choice])
    assert isinstance(head, CodedMatrix) and head.described == whole.described
    assert head.activations == whole.activations
    assert torch.equal(head.decoded(torch.float32), whole.decoded(torch.float32))


def test_a_head_in_codes_is_not_rounded_again() -> None:
    with pytest.raises(EngineStartError, match="head_quantization: the files have .* nf4"):
        rounded_head(coded("nf4", 64), ONLINE["int8"])
