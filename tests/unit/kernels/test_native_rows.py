"""Functions of rows by kernels in C: right, and the same bits for a row whatever is beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sidestep.kernels.native import rows as native
from sidestep.kernels.native.library import NoLibraryError, load
from sidestep.kernels.ops.gelu_mul import gelu_mul
from sidestep.kernels.ops.rms_norm import rms_norm
from sidestep.kernels.ops.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        load("rows.c")
    except NoLibraryError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_type", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(0, 8), (1, 1024), (5, 77), (300, 192)])
def test_the_norm_is_right(
    rows: int, count: int, weight_type: torch.dtype, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, count).to(dtype), torch.randn(count).to(weight_type)
    made = native.rms_norm(x, weight, 1e-5)
    if weight_type not in (dtype, torch.float32):
        assert made is None
        return
    assert made is not None and made.dtype == dtype
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed.to(dtype).double() * weight.double()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(made.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(0, 8), (1, 4096), (5, 77), (300, 192)])
@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_the_activation_is_right(
    name: str, spread: int, rows: int, count: int, dtype: torch.dtype
) -> None:
    both = (spread * torch.randn(rows, 2 * count)).to(dtype)
    if rows:
        both[0, :6] = torch.tensor([0.0, -200.0, 200.0, -88.0, 1e14, -1e14])
    made = native.silu_mul(both) if name == "silu" else native.gelu_mul(both)
    assert made is not None and made.dtype == dtype
    gate, up = both.double().chunk(2, -1)
    activated = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if name == "gelu"
        else gate * gate.sigmoid()
    )
    tolerance = 4 * torch.finfo(dtype).eps
    expected = activated.to(dtype).double() * up
    torch.testing.assert_close(made.double(), expected, rtol=tolerance, atol=1e-30 + tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(0, 8), (1, 1024), (5, 77), (300, 1030)])
def test_a_part_is_added_to_each_row(rows: int, count: int, dtype: torch.dtype) -> None:
    whole = torch.randn(rows, count + 9).to(dtype)
    for part in (torch.randn(rows, 2 * count).to(dtype)[:, 3 : count + 3], torch.randn(count)):
        x, part = whole.clone(), part.to(dtype)
        assert native.add(x[:, 4:-5], part)
        whole[:, 4:-5] += part
        assert torch.equal(x, whole)


SHAPES = [(0, 8), (1, 1024), (5, 77), (300, 1030)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), SHAPES)
def test_the_clamped_activation_is_right(rows: int, count: int, dtype: torch.dtype) -> None:
    both = (4 * torch.randn(rows, 2 * count)).to(dtype)
    made = native.clamped_swiglu(both, 1.702, 7.0)
    assert made is not None and made.dtype == dtype
    gate, up = both.double().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(made.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["silu", "gelu", "clamped"])
def test_the_number_of_rows_may_be_in_memory(name: str) -> None:
    both, used = torch.randn(9, 64), torch.tensor([4])
    functions: dict[str, Callable[[int | None], Tensor | None]] = {
        "silu": lambda address: native.silu_mul(both, address),
        "gelu": lambda address: native.gelu_mul(both, address),
        "clamped": lambda address: native.clamped_swiglu(both, 1.5, 2.0, address),
    }
    whole, part = functions[name](None), functions[name](used.data_ptr())
    assert whole is not None and part is not None
    assert torch.equal(part[:4], whole[:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), SHAPES)
def test_rows_are_multiplied_with_sigmoids(rows: int, count: int, dtype: torch.dtype) -> None:
    whole, gates = torch.randn(rows, count + 9).to(dtype), 6 * torch.randn(rows, count + 2)
    for gate in (gates.to(dtype)[:, 1:-1], gates.to(dtype)[:, 3:4]):
        x = whole.clone()
        assert native.sigmoid_mul(x[:, 4:-5], gate)
        expected = whole.double()
        expected[:, 4:-5] *= torch.sigmoid(gate.double())
        tolerance = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), SHAPES)
def test_rows_are_scaled_widened_and_joined(rows: int, count: int, dtype: torch.dtype) -> None:
    whole, factor = torch.randn(rows, count + 9).to(dtype), torch.tensor([0.3])
    x = whole.clone()
    assert native.scale(x[:, 4:-5], factor)
    whole[:, 4:-5] *= 0.3
    assert torch.equal(x, whole)
    wide = native.widened(x[:, 4:-5])
    assert wide is not None and wide.dtype == torch.float32
    assert torch.equal(wide, x[:, 4:-5].float())
    parts = [x[:, :4], x[:, 4:-5], x[:, 1:3]]
    joined = native.join_columns(parts)
    assert joined is not None and torch.equal(joined, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_in_place_leaves_other_columns(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 96).to(dtype), torch.randn(32).to(dtype)
    before, own = x.clone(), x[:, 32:64]
    assert native.rms_norm(own, weight, 1e-6, out=own) is own
    apart = native.rms_norm(before[:, 32:64], weight, 1e-6)
    assert apart is not None and torch.equal(own, apart)
    assert torch.equal(x[:, :32], before[:, :32]) and torch.equal(x[:, 64:], before[:, 64:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function", [lambda x: rms_norm(x, torch.ones(202, dtype=x.dtype), 1e-6), silu_mul, gelu_mul]
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    for x in (torch.randn(400, 202).to(dtype), torch.randn(400, 500).to(dtype)[:, 99:301]):
        together = function(x)
        for count in (1, 2, 3, 7, 40, 399):
            assert torch.equal(function(x[400 - count :]), together[400 - count :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_not_finite_stay_in_their_row(dtype: torch.dtype) -> None:
    x = torch.randn(3, 64).to(dtype)
    x[1, 5] = torch.nan
    for made in (
        native.silu_mul(x),
        native.gelu_mul(x),
        native.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6),
    ):
        assert made is not None
        assert made[[0, 2]].isfinite().all() and made[1].isnan().any()


def test_other_types_and_shapes_are_left_to_torch() -> None:
    weight = torch.ones(8)
    for x in (
        torch.ones(2, 8, dtype=torch.float16),
        torch.ones(2, 2, 8),
        torch.ones(2, 16)[:, ::2],
        torch.ones(2, 8, device="meta"),
    ):
        assert native.rms_norm(x, weight, 1e-6) is None and native.silu_mul(x) is None
        assert not native.add(x, x)
        assert not native.sigmoid_mul(x, x) and not native.scale(x, torch.ones(1))
        assert native.clamped_swiglu(x, 1.0, 1.0) is None and native.join_columns([x, x]) is None
    narrow = torch.ones(2, 8, dtype=torch.bfloat16)
    assert not native.add(torch.ones(2, 8), narrow[0])
    assert not native.sigmoid_mul(torch.ones(2, 8), narrow)
    assert not native.scale(torch.ones(2, 8), narrow[0, :1])
    assert native.join_columns([torch.ones(2, 8), narrow]) is None
