"""Products with quantized matrices on a CPU: right, independent of other rows, and small.

Which layouts can be had depends on the CPU. All assertions hold for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sidestep.executor.layers import cpu_product
from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.layers.layouts import coded_layouts, native_layouts, rounding_layouts
from sidestep.executor.layers.layouts.layout import LaidOut
from sidestep.executor.layers.linear import Linear
from sidestep.executor.models.weight_memory import weight_bytes
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, Codes, pack_halves

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = 0
"""Stands for all rows or columns in a group."""


def coded(
    kind: Codes,
    shape: tuple[int, int],
    group: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    zeros: bool = False,
    minimums: bool = False,
) -> CodedMatrix:
    """Return a matrix of random codes, with zeros of 0 and 15 among them."""
    torch.manual_seed(0)
    rows, columns = shape
    group = group[0] or rows, group[1] or columns
    groups = -(-rows // group[0]), -(-columns // group[1])
    if kind == "int8":
        codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    elif kind == "fp8":
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
    else:
        codes = pack_halves(torch.randint(0, 16, shape, dtype=torch.uint8))
    zero = torch.randint(0, 16, groups, dtype=torch.uint8)
    zero.view(-1)[:2] = torch.tensor([0, 15])[: zero.numel()]
    return CodedMatrix(
        kind=kind,
        codes=codes,
        scales=(torch.rand(groups) + 0.5) * 10.0 ** torch.randint(-6, 1, (groups[0], 1)),
        group=group,
        dtype=dtype,
        zeros=zero if zeros else None,
        minimums=torch.rand(groups) if minimums else None,
    )


FORMS: dict[str, Callable[[torch.dtype], CodedMatrix]] = {
    "int8 a row": lambda dtype: coded("int8", (96, 128), (1, 128), dtype),
    "int8 a row, odd": lambda dtype: coded("int8", (33, 77), (1, WHOLE), dtype),
    "int8 a matrix": lambda dtype: coded("int8", (40, 512), (WHOLE, WHOLE), dtype),
    "int8 in 32": lambda dtype: coded("int8", (50, 512), (1, 32), dtype),
    "int8 in 16": lambda dtype: coded("int8", (50, 512), (1, 16), dtype),
    "int8 with minimums": lambda dtype: coded("int8", (50, 64), (1, 64), dtype, minimums=True),
    **{
        f"int4 in {size}": partial(coded, "int4", (80, 1024), (1, size))
        for size in (32, 64, 128, 256, 512)
    },
    "int4 in 16": lambda dtype: coded("int4", (80, 64), (1, 16), dtype),
    "int4 a row": lambda dtype: coded("int4", (64, 96), (1, 96), dtype, zeros=True),
    "int4 a row, odd": lambda dtype: coded("int4", (33, 70), (1, WHOLE), dtype),
    "int4 zeros": lambda dtype: coded("int4", (48, 256), (1, 64), dtype, zeros=True),
    "int4 minimums": lambda dtype: coded("int4", (48, 256), (1, 32), dtype, minimums=True),
    "int4 short last group": lambda dtype: coded("int4", (70, 200), (1, 128), dtype, zeros=True),
    "int4 in blocks": lambda dtype: coded("int4", (70, 200), (64, 64), dtype),
    "fp8": lambda dtype: coded("fp8", (130, 520), (128, 128), dtype),
    "nf4": lambda dtype: coded("nf4", (64, 512), (1, 64), dtype),
    "fp4": lambda dtype: coded("fp4", (64, 512), (1, 32), dtype),
}


def check_product(product: Callable[[Tensor], Tensor], matrix: CodedMatrix) -> None:
    """Compare the products of several numbers of rows with those of the decoded matrix."""
    numbers = matrix.decoded(torch.float64)
    kind = torch.finfo(matrix.dtype)
    epsilon, spacing = max(kind.eps, 2**-11), kind.smallest_normal * kind.eps
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, matrix.shape[1]).to(matrix.dtype)
        made, expected = product(x), x.double() @ numbers.T
        assert made.dtype == matrix.dtype and made.is_contiguous()
        size = x.double().norm(dim=1)[:, None] * numbers.norm(dim=1)
        # The smallest numbers of float16 are this far apart. Weights and results are off by half.
        least = spacing / 2 * (1 + x.double().abs().sum(1)[:, None])
        assert ((made.double() - expected).abs() <= 3 * epsilon * size + least).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_decoded_matrix(form: str, dtype: torch.dtype) -> None:
    matrix = FORMS[form](dtype)
    check_product(CpuProduct(matrix), matrix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_alone_and_among_others(form: str, dtype: torch.dtype) -> None:
    matrix = FORMS[form](dtype)
    product, again = CpuProduct(matrix), CpuProduct(matrix)
    # One more than the column before, so that a slice of rows does not begin at a vector.
    x = torch.randn(300, matrix.shape[1] + 1).to(dtype)[:, 1:]
    together = product(x)
    assert torch.equal(again(x), together)
    for rows in range(1, 71):
        assert torch.equal(product(x[300 - rows :]), together[300 - rows :]), f"{rows} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_the_memory_of_a_quantized_matrix(kind: Codes, dtype: torch.dtype) -> None:
    """Compare the bytes with those of the matrix in float32."""
    linear = Linear(coded(kind, (512, 1024), (1, 0 if kind == "int8" else 32), dtype))
    layout = repr(linear).split(", ")[1].rstrip(")")
    most = {"int4": 0.17, "eights": 0.26, "int8": 0.26, "float16": 0.51, "decoded": 1.0}
    most["native"] = 0.17 if kind == "int4" else 0.26
    least = 0.125 if kind == "int4" else 0.25
    assert least <= weight_bytes(linear) / (4 * 512 * 1024) <= most[layout]


def test_layouts_are_chosen_by_form_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave like a CPU with all operators and with none."""
    monkeypatch.setattr(cpu_product, "_chosen", {})
    tried: list[str] = []

    def layout(name: str) -> Callable[[CodedMatrix], LaidOut | None]:
        def none(matrix: CodedMatrix) -> None:
            tried.append(name)

        return none

    for name in ("native", "int4", "eights", "int8", "float16"):
        monkeypatch.setitem(cpu_product._LAYOUTS, name, layout(name))
    matrix = coded("int4", (512, 1024), (1, 64), torch.bfloat16, zeros=True)
    product = CpuProduct(matrix)
    names = ["native", "int4", "eights", "int8", "float16"]
    assert tried == names and product.kind == "decoded"
    check_product(product, matrix)
    CpuProduct(matrix)
    assert tried == names, "a form is tried once"
    CpuProduct(FORMS["int4 zeros"](torch.bfloat16))
    assert tried[len(names) :] == ["int4", "int8", "float16"], "small matrices are not rounded"


def missing(namespace: str, name: str) -> None:
    """Find no operator."""


def wrong(namespace: str, name: str) -> Callable[..., Any]:
    """Find operators that return something else than a product."""
    return lambda x, *_: torch.zeros(len(x), 96) if "mm" in name or "dynamic" in name else x


def changed(namespace: str, name: str) -> Callable[..., Any]:
    """Find operators that do not take the arguments."""
    return lambda: SimpleNamespace()


@pytest.mark.parametrize("found", [missing, wrong, changed])
@pytest.mark.parametrize("form", ["int8 a row", "int4 in 64", "nf4", "large"])
def test_operators_that_are_missing_or_wrong_are_not_used(
    form: str, found: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_product, "_chosen", {})
    for layouts in (coded_layouts, rounding_layouts):
        monkeypatch.setattr(layouts, "operator", found)
    monkeypatch.setattr(native_layouts, "kernel_of", lambda *_: None)
    for dtype in (torch.float32, torch.bfloat16):
        large = partial(coded, "int8", (512, 1024), (1, WHOLE))
        matrix = (large if form == "large" else FORMS[form])(dtype)
        product = CpuProduct(matrix)
        assert product.kind == "decoded"
        check_product(product, matrix)


def test_scales_that_are_zero_or_tiny_make_small_results() -> None:
    matrix = coded("int8", (32, 512), (1, 32))
    matrix.scales[:4] = 0
    matrix.scales[4:8] = 1e-38
    check_product(CpuProduct(matrix), matrix)


@pytest.mark.parametrize("kind", get_args(Codes))
def test_a_linear_layer_of_each_kind_of_codes(kind: Codes) -> None:
    matrix, bias = coded(kind, (64, 512), (1, 64)), torch.randn(64)
    linear = Linear(matrix, bias)
    check_product(lambda x: linear(x) - bias, matrix)
