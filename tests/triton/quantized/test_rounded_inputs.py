"""Products of inputs and matrices that both are in 8 bits, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels import gpu
from sidestep.kernels.ops.rms_norm import QuantizedRows, RmsNorm, Stream, rms_norm
from sidestep.kernels.ops.silu_mul import GateAndUp, silu_mul
from sidestep.kernels.products.coded_linear import (
    add_coded_linear,
    coded_gated_linear,
    coded_linear,
)
from sidestep.kernels.products.partial_sums import MOST_PARTIALS
from sidestep.kernels.products.scaled_config import ScaledConfig, scaled_config
from sidestep.kernels.quantized.coded_matrix import ROUNDED, CodedMatrix, Rounded, stack
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from sidestep.kernels.quantized.quantize_rows_triton import quantize_rows
from sidestep.kernels.quantized.scaled_library import (
    scaled_by_library,
    suits_library,
    unscaled_by_library,
)
from sidestep.kernels.quantized.scaled_product_triton import rounds_inputs, scaled_product
from sidestep.kernels.unfinished_product import UnscaledProduct
from tests.triton.quantized.coded_matrices import WHOLE, Form, matrix_of
from tests.triton.support import (
    DEVICE,
    DTYPE,
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

LARGEST = {"fp8": 448.0, "int8": 127.0}
BLOCK, CHANNEL, INTEGER = Form("fp8", 128, 128), Form("fp8", WHOLE), Form("int8", WHOLE)


TILES = (
    ScaledConfig(128),
    ScaledConfig(128, split=2, unroll=2),
    ScaledConfig(128, 64, stages=3, split=4),
    ScaledConfig(64, 32, stages=2),
    ScaledConfig(128, stages=4, split=2, block_n=64, num_warps=4),
)


def numbers_of(rows: QuantizedRows, columns: int) -> Tensor:
    """Return the numbers [T, K] in float64."""
    tokens, filled = rows.codes.shape
    # The codes lie in the order of a matrix's words.
    places = torch.arange(64).view(4, 2, 4, 2).permute(2, 0, 3, 1).flip(-1).flatten()
    codes = torch.empty(tokens, filled // 64, 64, device=rows.codes.device)
    codes[..., places] = rows.codes.float().view(tokens, -1, 64)
    assert not codes.flatten(1)[:, columns:].any(), "filled up with other numbers than 0"
    width = filled // rows.scales.shape[1]
    return (codes.flatten(1).double() * rows.scales.double().repeat_interleave(width, 1))[
        :, :columns
    ]


def rounded(x: Tensor, kind: Rounded, width: int, scale: Tensor | None = None) -> Tensor:
    """Return x, rounded to 8 bits with a scale for each `width` columns."""
    tokens, columns = x.shape
    filled = torch.nn.functional.pad(x.float(), (0, -columns % width)).view(tokens, -1, width)
    largest = LARGEST[kind]
    scales = filled.abs().amax(-1, keepdim=True).clamp(1e-30) / largest if scale is None else scale
    codes = (filled / scales).clamp(-largest, largest)
    codes = codes.round() if kind == "int8" else codes.to(ROUNDED[kind])
    return (codes.double() * scales.double()).flatten(1)[:, :columns]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("columns", [300, 128])
def test_rows_are_rounded_to_the_nearest(kind: Rounded, grouped: bool, columns: int) -> None:
    values = Values(columns)
    buffer = poisoned(4, columns + 8, dtype=DTYPE)
    x = buffer[:, :columns].copy_(values.normal(4, columns, dtype=DTYPE))
    x[1] = 0
    x[2, 5] = 1000
    with unchanged(x=buffer), PoisonedAllocations():
        found = quantize_rows(x, kind, grouped=grouped)
    expected = rounded(x, kind, 128 if grouped else columns)
    given = numbers_of(found, columns)
    if INTERPRETED:
        assert_close(given.float(), expected)
    else:  # a division's last bit may round a number to the other side
        torch.testing.assert_close(given, expected, rtol=2.0**-3, atol=1e-2)


def test_a_fixed_scale_clamps() -> None:
    x = Values(0).normal(3, 200, dtype=DTYPE, scale=2)
    scale = torch.full((1,), 2.0**-9, device=DEVICE)
    found = numbers_of(quantize_rows(x, "fp8", grouped=False, input_scale=scale), 200)
    assert_close(found.float(), rounded(x, "fp8", 200, scale))
    assert found.abs().max() == 448 / 512


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_that_are_not_finite_stay_apart(kind: Rounded, bad: float) -> None:
    x = Values(0).normal(3, 200, dtype=DTYPE)
    alone = quantize_rows(x[:1], kind, grouped=False)
    x[1, 7] = bad
    found = quantize_rows(x, kind, grouped=False)
    assert torch.equal(found.codes[:1].view(torch.uint8), alone.codes.view(torch.uint8))
    form = CHANNEL if kind == "fp8" else INTEGER
    out = torch.empty(3, 70, dtype=DTYPE, device=DEVICE)
    scaled_product(found, DeviceMatrix.of(matrix_of(form, 70, 200, DTYPE)), None, out)
    assert not out[1].isfinite().any() and out[0].isfinite().all() and out[2].isfinite().all()


@pytest.mark.parametrize("done", [False, True])
def test_the_norm_is_done_on_the_way(done: bool) -> None:
    values = Values(0)
    hidden, weight = values.normal(3, 200, dtype=DTYPE, scale=7), values.normal(200, dtype=DTYPE)
    result = rms_norm(hidden, weight, 1e-5)
    stream = Stream(hidden, RmsNorm(weight, 1e-5), done=result if done else None)
    found = numbers_of(quantize_rows(stream, "fp8", grouped=True), 200)
    torch.testing.assert_close(found, result.double(), rtol=2.0**-4, atol=0.02)


def test_parts_of_a_sum_are_added_in_order() -> None:
    values = Values(0)
    hidden, weight = values.normal(3, 200, dtype=DTYPE, scale=7), values.normal(200, dtype=DTYPE)
    parts = guarded(values.normal(3, 3, 200, dtype=torch.float32))
    summed = (hidden.float() + ((parts[0] + parts[1]) + parts[2])).to(DTYPE)
    norm = RmsNorm(weight, 1e-5)
    alone = quantize_rows(Stream(summed.clone(), norm), "fp8", grouped=False)
    with unchanged(parts=parts), PoisonedAllocations():
        found = quantize_rows(Stream(hidden, norm), "fp8", grouped=False, added=parts)
    assert torch.equal(hidden, summed)
    assert torch.equal(found.codes.view(torch.uint8), alone.codes.view(torch.uint8))


@pytest.mark.parametrize("grouped", [False, True])
def test_the_sum_into_the_stream_is_done_on_the_way(grouped: bool) -> None:
    values = Values(0)
    buffer = poisoned(3, 208, dtype=DTYPE)
    hidden = buffer[:, :200].copy_(values.normal(3, 200, dtype=DTYPE, scale=7))
    added, weight = guarded(values.normal(3, 200, dtype=DTYPE)), values.normal(200, dtype=DTYPE)
    summed = hidden + added
    norm = RmsNorm(weight, 1e-5)
    alone = quantize_rows(Stream(summed.clone(), norm), "fp8", grouped=grouped)
    with unchanged(added=added, between=buffer[:, 200:]), PoisonedAllocations():
        found = quantize_rows(Stream(hidden, norm), "fp8", grouped=grouped, added=added)
    assert torch.equal(hidden, summed)
    assert torch.equal(found.codes.view(torch.uint8), alone.codes.view(torch.uint8))
    assert torch.equal(found.scales, alone.scales)


def test_scales_are_applied_before_the_sum() -> None:
    values = Values(2)
    hidden, weight = values.normal(3, 200, dtype=DTYPE, scale=7), values.normal(200, dtype=DTYPE)
    product = guarded(values.normal(3, 200, dtype=DTYPE))
    rows, columns = (values.normal(*size, dtype=torch.float32) for size in ((3, 1), (1, 200)))
    summed = (hidden.float() + product.float() * (columns * rows)).to(DTYPE)
    norm = RmsNorm(weight, 1e-5)
    alone = quantize_rows(Stream(summed.clone(), norm), "fp8", grouped=False)
    added = UnscaledProduct(product, rows, columns)
    with unchanged(product=product), PoisonedAllocations():
        found = quantize_rows(Stream(hidden, norm), "fp8", grouped=False, added=added)
    assert torch.equal(hidden, summed)
    assert torch.equal(found.codes.view(torch.uint8), alone.codes.view(torch.uint8))


@pytest.mark.parametrize("columns", [300, 128])
def test_the_activation_is_done_on_the_way(columns: int) -> None:
    both = guarded(Values(columns).normal(3, 2 * columns, dtype=DTYPE))
    alone = quantize_rows(silu_mul(both), "fp8", grouped=False)
    with unchanged(both=both), PoisonedAllocations():
        found = quantize_rows(GateAndUp(both), "fp8", grouped=False)
    torch.testing.assert_close(found.scales, alone.scales, rtol=1e-5, atol=0)
    given, expected = numbers_of(found, columns), numbers_of(alone, columns)
    torch.testing.assert_close(given, expected, rtol=2.0**-3, atol=1e-2)


def test_gates_of_any_size() -> None:
    gates = torch.tensor([-1e4, -100, -88, -20, -1, -1e-30, 0, 1e-30, 20, 88, 1e4])
    both = guarded(torch.cat([gates, gates.abs() / 8 + 1]).to(DEVICE, DTYPE)[None])
    found = numbers_of(quantize_rows(GateAndUp(both), "fp8", grouped=False), len(gates))
    alone = numbers_of(quantize_rows(silu_mul(both), "fp8", grouped=False), len(gates))
    torch.testing.assert_close(found, alone, rtol=2.0**-3, atol=1e-2)
    # Infinities are not lost, nor is NaN.
    for gate, up in ((float("inf"), 1.0), (1.0, float("inf")), (float("nan"), 1.0)):
        odd = torch.full((1, 22), 1.0, dtype=DTYPE, device=DEVICE)
        odd[0, 0], odd[0, 11] = gate, up
        scale = quantize_rows(GateAndUp(guarded(odd)), "fp8", grouped=False).scales
        assert not scale.isfinite().item()
    # This gate gives 0, though its power is infinite.
    low = torch.tensor([[-1e5] + 21 * [1.0]], dtype=DTYPE, device=DEVICE)
    assert quantize_rows(GateAndUp(guarded(low)), "fp8", grouped=False).scales.isfinite().item()


def test_scales_are_applied_before_the_activation() -> None:
    values = Values(1)
    both = guarded(values.normal(3, 2 * 200, dtype=DTYPE))
    rows, columns = (values.normal(*size, dtype=torch.float32) for size in ((3, 1), (1, 400)))
    scaled = (both.float() * (columns * rows)).to(DTYPE)
    alone = quantize_rows(GateAndUp(scaled), "fp8", grouped=False)
    given = GateAndUp(UnscaledProduct(both, rows, columns))
    with unchanged(both=both), PoisonedAllocations():
        found = quantize_rows(given, "fp8", grouped=False)
    assert torch.equal(found.scales, alone.scales)
    assert torch.equal(found.codes.view(torch.uint8), alone.codes.view(torch.uint8))
    torch.testing.assert_close(given.computed(), silu_mul(scaled), rtol=1e-2, atol=1e-2)


@pytest.fixture
def rounding_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the interpreter stand for a GPU that multiplies in 8 bits."""
    if INTERPRETED:
        monkeypatch.setattr(gpu, "_stand_ins", {})
        gpu.stand_for(gpu.Gpu(89, 2), "cpu")
    yield
    gpu.gpu_of.cache_clear()


@pytest.mark.usefixtures("rounding_gpu")
def test_the_next_inputs_are_rounded_on_the_way() -> None:
    """Check a layer's MLP against the same with each kernel by itself."""
    values, half = Values(3), torch.float16 if INTERPRETED else torch.bfloat16
    given = [
        replace(matrix_of(CHANNEL, *size, half), activations="fp8")
        for size in ((320, 256), (256, 160), (96, 256))
    ]
    up, down, qkv = map(DeviceMatrix.of, given)
    stream, norm = values.normal(70, 256, dtype=half), RmsNorm(values.normal(256, dtype=half), 1e-5)
    inner = coded_gated_linear(Stream(stream, norm), up, None)
    assert isinstance(inner, GateAndUp)
    together, apart = stream.clone(), stream.clone()
    begun = add_coded_linear(together, inner, down, None, norm)
    assert isinstance(begun, QuantizedRows)
    assert add_coded_linear(apart, inner.computed(), down, None) is None
    for summed, inputs in ((together, inner), (apart, inner.computed())):
        inputs_of_down = numbers_of(quantize_rows(inputs, "fp8", grouped=False), 160)
        product = inputs_of_down @ given[1].decoded(torch.float32).double().T
        assert_close(summed, stream.double() + product)
    found = coded_linear(Stream(together, norm, begun), qkv, None)
    assert torch.equal(found, coded_linear(Stream(together, norm), qkv, None))
    # Another matrix may need other scales.
    block = DeviceMatrix.of(replace(matrix_of(BLOCK, 96, 256, half), activations="fp8"))
    other = coded_linear(Stream(together, norm, begun), block, None)
    assert torch.equal(other, coded_linear(Stream(together, norm), block, None))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("form", [BLOCK, CHANNEL, INTEGER, Form("fp8", 256)], ids=str)
def test_products(form: Form, add: bool) -> None:
    tokens, outputs, inputs = 140, 150, 300
    values = Values(1)
    x = values.normal(tokens, inputs, dtype=DTYPE)
    given = matrix_of(form, outputs, inputs, DTYPE)
    kind: Rounded = "int8" if form.kind == "int8" else "fp8"
    rows = quantize_rows(x, kind, grouped=form.width != WHOLE)
    bias = guarded(values.normal(outputs, dtype=DTYPE))
    whole = poisoned(tokens, outputs + 8, dtype=DTYPE)
    out = whole[:, :outputs]
    expected = numbers_of(rows, inputs) @ given.decoded(torch.float32).double().T + bias.double()
    if add:
        out.copy_(values.normal(tokens, outputs, dtype=DTYPE))
        expected += out.double()
    with unchanged(codes=rows.codes.view(torch.uint8), between=whole[:, outputs:]):
        scaled_product(rows, DeviceMatrix.of(given), bias, out, add=add)
    assert_margins_untouched(whole)
    assert_close(out, expected)


@needs_gpu
@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_tiles_of_the_kernel_for_hopper(config: ScaledConfig, bias: bool, add: bool) -> None:
    from sidestep.kernels.products.scaled_wide_gluon import launch

    for tokens, outputs, inputs in ((300, 200, 1000), (65, 336, 512)):
        values = Values(tokens)
        given = matrix_of(CHANNEL, outputs, inputs, DTYPE)
        matrix = DeviceMatrix.of(given)
        rows = quantize_rows(values.normal(tokens, inputs, dtype=DTYPE), "fp8", grouped=False)
        added = guarded(values.normal(outputs, dtype=DTYPE)) if bias else None
        whole = poisoned(tokens, outputs + 8, dtype=DTYPE)
        out = whole[:, :outputs]
        x, w = numbers_of(rows, inputs), given.decoded(torch.float32).double()
        expected = x @ w.T
        if added is not None:
            expected += added.double()
        if add:
            out.copy_(values.normal(tokens, outputs, dtype=DTYPE))
            expected += out.double()
        with unchanged(codes=rows.codes.view(torch.uint8), between=whole[:, outputs:]):
            launch(rows, matrix, added, out, add, config)
        assert_margins_untouched(whole)
        assert_close(out, expected)
        if not (bias or add):
            parts = poisoned(config.split, tokens, outputs, dtype=torch.float32)
            launch(rows, matrix, None, parts, False, config)
            assert_margins_untouched(parts)
            # A sum of 512 columns stays in the tensor cores. They cut each number they add behind
            # the 14th bit of the largest one. Such sums, computed on a host, stay below half
            # of this bound, and those with a column too few do not.
            errors = (parts.sum(0).double() - expected).abs()
            size = x.norm(dim=1)[:, None] * w.norm(dim=1)[None, :]
            assert (errors <= 2.0**-11 * size).all()


@pytest.mark.parametrize("leaving", [False, True])
def test_programs_that_share_a_tile_run_at_once(leaving: bool) -> None:
    """Check the choice of tiles: programs that wait for one another must all have a processor."""
    found = set()
    for tokens in range(28, 600, 4):
        for outputs, inputs in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
            config = scaled_config(tokens, outputs, inputs, 132, leaving=leaving)
            assert config is None or 32 < tokens <= 512
            if config is None:
                continue
            tiles = -(-outputs // config.block_n) * -(-tokens // (config.rows + config.more))
            assert config.split == 1 or tiles * config.split <= 132
            sums = tiles * config.split * config.block_n * (config.rows + config.more)
            assert config.split == 1 or sums <= MOST_PARTIALS
            found.add((config.rows, config.more))
    assert {(128, 0), (128, 64), (64, 32), (64, 0)} == found


def test_products_of_the_library_without_memory() -> None:
    """Kernels are compiled ahead with such tensors, and not every torch knows this product."""
    matrix = DeviceMatrix.of(matrix_of(CHANNEL, 160, 300, torch.bfloat16))
    matrix = replace(matrix, words=matrix.words.to("meta"), scales=matrix.scales.to("meta"))
    rows = QuantizedRows(
        torch.empty(600, 384, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(600, 1, device="meta"),
    )
    out = torch.empty(600, 160, dtype=torch.bfloat16, device="meta")
    assert scaled_by_library(rows, matrix, None, out) is out
    for made in (scaled_by_library(rows, matrix, None), unscaled_by_library(rows, matrix)):
        assert (made.shape, made.dtype, made.is_meta) == (out.shape, out.dtype, True)


def test_products_of_the_library() -> None:
    half = torch.bfloat16
    x = Values(1).normal(70, 300, dtype=half)
    given = replace(matrix_of(CHANNEL, 160, 300, half), activations="fp8")
    matrix = DeviceMatrix.of(given)
    assert suits_library(matrix)
    odd = replace(matrix_of(CHANNEL, 150, 300, half), activations="fp8")
    assert not suits_library(DeviceMatrix.of(odd))
    rows, bias = quantize_rows(x, "fp8", grouped=False), Values(2).normal(160, dtype=half)
    product = numbers_of(rows, 300) @ given.decoded(torch.float32).double().T
    assert_close(scaled_by_library(rows, matrix, None), product)
    out = poisoned(70, 160, dtype=half)
    assert scaled_by_library(rows, matrix, bias, out) is out
    assert_close(out, product + bias.double(), 8)
    assert_margins_untouched(out)
    unscaled = unscaled_by_library(rows, matrix).double()
    assert_close((unscaled * rows.scales * matrix.scales).to(half), product, 8)


@pytest.mark.parametrize("form", [BLOCK, INTEGER], ids=str)
def test_gated_products(form: Form) -> None:
    x = Values(1).normal(5, 300, dtype=DTYPE)
    given = matrix_of(form, 2 * 70, 300, DTYPE)
    kind: Rounded = "int8" if form.kind == "int8" else "fp8"
    rows = quantize_rows(x, kind, grouped=form.width != WHOLE)
    gate, up = (numbers_of(rows, 300) @ given.decoded(torch.float32).double().T).chunk(2, 1)
    out = poisoned(5, 70, dtype=DTYPE)
    scaled_product(rows, DeviceMatrix.of(given), None, out, gated=True)
    assert_margins_untouched(out)
    assert_close(out, gate / (1 + (-gate).exp()) * up)


def test_inputs_are_rounded_only_for_matrices_made_for_it() -> None:
    half = torch.bfloat16
    made = replace(matrix_of(BLOCK, 8, 256, half), activations="fp8")
    assert rounds_inputs(DeviceMatrix.of(made), 90)
    assert not rounds_inputs(DeviceMatrix.of(made), 80), "no tensor cores for it"
    assert not rounds_inputs(DeviceMatrix.of(replace(made, activations=None)), 90)
    small = replace(matrix_of(Form("fp8", 32), 8, 256, half), activations="fp8")
    assert not rounds_inputs(DeviceMatrix.of(small), 90)
    integers = replace(matrix_of(INTEGER, 8, 256, half), activations="int8")
    assert rounds_inputs(DeviceMatrix.of(integers), 80)


def test_stacked_matrices_take_inputs_of_the_largest_scale() -> None:
    parts: list[CodedMatrix] = [
        replace(
            matrix_of(CHANNEL, 8, 64, DTYPE),
            activations="fp8",
            input_scale=torch.tensor([scale], device=DEVICE),
        )
        for scale in (0.5, 2.0, 1.0)
    ]
    both = stack(parts)
    assert both.input_scale is not None and both.input_scale.tolist() == [2.0]
    with pytest.raises(ValueError, match="several forms"):
        stack([parts[0], replace(parts[1], activations=None)])
