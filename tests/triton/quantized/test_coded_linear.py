"""Products with matrices in 8 or 4 bits, against float64 of the decoded matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.silu_mul import computed
from sidestep.kernels.products.coded_linear import (
    MAX_ROWS,
    add_coded_linear,
    choose,
    coded_gated_linear,
    coded_linear,
    scale_bytes,
    split_of,
)
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.own_linear import add_own_linear, own_linear
from sidestep.kernels.products.streamed_config import (
    OneRowConfig,
    StreamedConfig,
    WideConfig,
    padded,
)
from sidestep.kernels.quantized import clustered_codes
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from sidestep.kernels.quantized.decode_matrix_triton import decode_matrix
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from tests.triton.quantized.coded_matrices import FORMS, RARE_FORMS, WHOLE, Form, matrix_of
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
    same,
    unchanged,
)

SMALL = CodedConfig(64, 16, num_stages=2)
SPLIT = replace(SMALL, split=2)
CHANNEL = Form("fp8", WHOLE)
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def without_memory(outputs: int, inputs: int) -> DeviceMatrix:
    """Return a matrix of 4 bits in groups of 128 columns, on the device `meta`."""
    scales = torch.empty(outputs, inputs // 128, device="meta")
    return DeviceMatrix.of(
        CodedMatrix(
            kind="int4",
            codes=torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta"),
            scales=scales,
            group=(1, 128),
            dtype=torch.bfloat16,
            zeros=scales.to(torch.uint8),
        )
    )


def on_device(matrix: CodedMatrix) -> DeviceMatrix:
    """Return the matrix as kernels read it, between margins of poison."""
    found = DeviceMatrix.of(matrix)
    minimums = None if found.minimums is None else guarded(found.minimums)
    return replace(
        found, words=guarded(found.words), scales=guarded(found.scales), minimums=minimums
    )


def exact(
    x: Tensor, matrix: CodedMatrix, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    out = x.double() @ matrix.decoded(torch.float32).double().T
    if bias is not None:
        out += bias.double()
    if gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out


def assert_product(found: Tensor, expected: Tensor, form: Form) -> None:
    """Compare a product; NormalFloat's numbers are rounded to 16 bits."""
    if form.kind == "nf4":
        # A few of millions of sums have errors of several times the mean.
        assert (found.double() - expected).norm() < 0.01 * expected.norm()
        torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)
    elif form.width < 128 or form.minimums:
        # In 16 bits a weight is rounded once more.
        assert_close(found, expected, 8)
    else:
        assert_close(found, expected)


def check(
    form: Form,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = DTYPE,
    config: CodedConfig = SMALL,
    *,
    with_bias: bool = False,
    gated: bool = False,
) -> None:
    """Check the product of rows that lie apart, into memory whose rows do too."""
    values = Values(rows + outputs + inputs)
    buffer = poisoned(rows, inputs + 8, dtype=dtype)
    x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
    count = outputs * (1 + gated)
    given = matrix_of(form, count, inputs, dtype)
    matrix = on_device(given)
    bias = guarded(values.normal(count, dtype=dtype)) if with_bias else None
    whole = poisoned(rows, outputs + 5, dtype=dtype)
    with (
        unchanged(x=buffer, words=matrix.words, scales=matrix.scales, between=whole[:, outputs:]),
        PoisonedAllocations(),
    ):
        out = own_linear(x, matrix, bias, gated=gated, config=config, out=whole[:, :outputs])
    assert_margins_untouched(whole)
    assert_product(out, exact(x, given, bias, gated), form)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form: Form) -> None:
    check(form, 3, 80, 336, with_bias=True)
    check(form, 5, 70, 272, HALF, SPLIT)


@pytest.mark.parametrize("form", RARE_FORMS, ids=str)
def test_rare_forms(form: Form) -> None:
    check(form, 2, 70, 272)


@pytest.mark.parametrize("form", FORMS + RARE_FORMS, ids=str)
@pytest.mark.parametrize("columns", [256, 272])
def test_a_decoded_matrix_has_the_numbers(form: Form, columns: int) -> None:
    for dtype in (DTYPE, HALF):
        given = matrix_of(form, 70, columns, dtype)
        matrix = on_device(given)
        with unchanged(words=matrix.words, scales=matrix.scales), PoisonedAllocations():
            found = decode_matrix(matrix)
        tolerance = 0.01 if form.kind == "nf4" else torch.finfo(dtype).eps
        exact = given.decoded(torch.float32).to(found.device)
        torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS[:5], ids=str)
@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=str)
def test_gated(form: Form, config: CodedConfig) -> None:
    check(form, 3, 72, 272, config=config, gated=True, with_bias=True)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 80])
def test_numbers_of_rows_as_shipped(rows: int) -> None:
    values = Values(rows)
    for form in (Form("fp8", 128, 128), Form("int4", 128, zeros=True)):
        x = guarded(values.normal(rows, 400, dtype=DTYPE))
        given = matrix_of(form, 200, 400, DTYPE)
        matrix = on_device(given)
        with PoisonedAllocations():
            assert_product(coded_linear(x, matrix, None), exact(x, given), form)
            found = computed(coded_gated_linear(x, matrix, None))
        assert_product(found, exact(x, given, gated=True), form)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [DTYPE, HALF])
def test_all_codes_are_exact(kind: str, dtype: torch.dtype) -> None:
    """Check codes with a scale of 1, by the product with the identity."""
    bytes_ = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128)
    scales = torch.ones(2, 1, device=DEVICE)
    if kind == "fp8":
        codes = bytes_.masked_fill((bytes_ & 127) == 127, 0).view(torch.float8_e4m3fn)
    else:
        codes = bytes_.view(torch.int8) if kind == "int8" else bytes_
    columns = 128 if kind in ("fp8", "int8") else 256
    matrix = CodedMatrix(
        kind=kind,  # type: ignore[arg-type]  # one of these
        codes=codes,
        scales=scales,
        group=(1, columns),
        dtype=dtype,
    )
    one = torch.eye(columns, dtype=dtype, device=DEVICE)
    found = own_linear(one, on_device(matrix), config=CodedConfig(64, 64, num_stages=2))
    assert torch.equal(found.T.double(), matrix.decoded(torch.float32).double())


def test_each_of_the_programs_that_share_a_tile_has_some_columns() -> None:
    for steps in range(1, 300):
        split = split_of(64, STEP * steps, 264)
        assert (split - 1) * -(-steps // split) < steps


@needs_gpu
@pytest.mark.parametrize("form", FORMS[:5], ids=str)
def test_programs_without_columns_end(form: Form) -> None:
    given = matrix_of(form, 64, 33 * STEP, DTYPE)
    x = Values(0).normal(2, 33 * STEP, dtype=DTYPE)
    matrix = on_device(given)
    config = StreamedConfig(32 * matrix.in_word, 3, 8)
    assert_product(own_linear(x, matrix, config=config), exact(x, given), form)


@needs_gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("form", [*FORMS[:5], Form("int4", WHOLE, zeros=True)], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        WideConfig(256, 128, 2, 3, unroll=1, step=256),
        WideConfig(256, 128, 3, 2),
        WideConfig(128, 256, 2, 3, unroll=1),
        WideConfig(128, 128, 3, unroll=3),
        WideConfig(128, 128, 3, 2, more=64),
        WideConfig(128, 64, 2, num_warps=4, more=32),
    ],
    ids=str,
)
def test_many_rows(config: WideConfig, form: Form, add: bool) -> None:
    """Check tiles and rings, with rows, columns and groups that fill none of them."""
    from sidestep.kernels.products.wide_codes_gluon import launch

    for rows, outputs, inputs in ((65, 200, 400), (300, 520, 2064)):
        values = Values(rows)
        buffer = poisoned(rows, inputs + 8, dtype=DTYPE)
        x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=DTYPE))
        given = matrix_of(form, outputs, inputs, DTYPE)
        matrix = on_device(given)
        bias = guarded(values.normal(outputs, dtype=DTYPE))
        whole = poisoned(rows, outputs + 8, dtype=DTYPE)
        out = whole[:, :outputs]
        expected = exact(x, given, bias)
        if add:
            out.copy_(values.normal(rows, outputs, dtype=DTYPE))
            expected += out.double()
        wide = config if matrix.in_word == 8 else replace(config, step=STEP)
        with unchanged(x=buffer, words=matrix.words, between=whole[:, outputs:]):
            launch(x, matrix, bias, out, add, wide)
        assert_margins_untouched(whole)
        # Scales of groups are rounded to 16 bits, and so are the numbers.
        assert_close(out, expected, 8)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 32, 33, 64])
def test_rings_and_scales_fit_into_shared_memory(rows: int, gated: bool) -> None:
    with like_gpu(Gpu(90, 132), "meta"):
        for inputs in (1024, 1536, 4096, 14336, 16384, 16640, 28672 if gated else 49152):
            for outputs in (1024, 4096, 14336, 40960):
                matrix = without_memory(outputs * (1 + gated), inputs)
                config = choose(rows, matrix, gated)
                if isinstance(config, OneRowConfig):
                    continue
                assert isinstance(config, StreamedConfig)
                tiles = 1 + (gated and rows <= 32)
                step = config.block_n * tiles * 128 + padded(rows) * config.block_k * 2
                scales = config.block_n * tiles * scale_bytes(inputs, config.split, matrix)
                assert config.stages * step + scales <= 226 << 10, (outputs, inputs, config)


@needs_gpu
@pytest.mark.parametrize("rows", [65, 160, 256, 700])
def test_the_chosen_tiles_fit(rows: int) -> None:
    for outputs, inputs in ((6144, 4096), (4096, 14336), (520, 400)):
        for form in (Form("int4", 128, zeros=True), Form("fp8", 128, 128), Form("int8", WHOLE)):
            x = Values(rows).normal(rows, inputs, dtype=DTYPE)
            given = matrix_of(form, outputs, inputs, DTYPE)
            found = coded_linear(x, on_device(given), None)
            assert_close(found, exact(x, given), 8)


def test_a_code_that_is_nan_makes_its_row_nan() -> None:
    values = Values(1)
    x = values.normal(3, 256, dtype=DTYPE)
    given = matrix_of(Form("fp8", 128, 128), 130, 256, DTYPE)
    given.codes.view(torch.uint8)[7, 200], given.codes.view(torch.uint8)[129, 0] = 0x7F, 0xFF
    found = own_linear(x, on_device(given), config=SMALL)
    expected = exact(x, given)
    assert found.isnan().nonzero()[:, 1].unique().tolist() == [7, 129]
    there = ~expected.isnan()
    assert_close(found[there], expected[there])


def test_groups_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        DeviceMatrix.of(matrix_of(Form("int4", 24), 8, 48, DTYPE))


# In the stream.


@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=str)
@pytest.mark.parametrize("form", [CHANNEL, Form("int4", 128, zeros=True)], ids=str)
def test_products_added_to_the_stream_begin_the_norm(form: Form, config: CodedConfig) -> None:
    rows, outputs, inputs = 3, 80, 272
    values = Values(1)
    x = guarded(values.normal(rows, inputs, dtype=DTYPE))
    given = matrix_of(form, outputs, inputs, DTYPE)
    bias = guarded(values.normal(outputs, dtype=DTYPE))
    norm = RmsNorm(guarded(values.normal(outputs, dtype=DTYPE)), 1e-5)
    whole = poisoned(rows, outputs + 8, dtype=DTYPE)
    stream = whole[:, :outputs].copy_(values.normal(rows, outputs, dtype=DTYPE, scale=7))
    expected = exact(x, given, bias) + stream.double()
    with unchanged(x=x, between=whole[:, outputs:]), PoisonedAllocations():
        begun = add_own_linear(stream, x, on_device(given), bias, norm=norm, config=config)
    assert begun is not None
    assert_close(stream, expected)
    assert_close(begun.weighted, stream.double() * norm.weight.double(), 1)
    squares = [part.square().sum(1) for part in stream.double().split(config.block_n, 1)]
    assert_close(begun.squares, torch.stack(squares, 1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_begun_norm_is_finished(parts: int, gated: bool) -> None:
    rows, inputs = 3, 272
    values = Values(parts)
    weighted = guarded(values.normal(rows, inputs, dtype=DTYPE, scale=7))
    scale = (49 * inputs / parts) ** 0.5
    squares = guarded(values.normal(rows, parts, dtype=torch.float32, scale=scale).square())
    norm = RmsNorm(poisoned(inputs, dtype=DTYPE), 1e-5)
    stream = Stream(poisoned(rows, inputs, dtype=DTYPE), norm, BegunNorm(weighted, squares))
    given = matrix_of(CHANNEL, 140, inputs, DTYPE)
    factor = (squares.double().sum(1, keepdim=True) / inputs + norm.eps).rsqrt()
    for config in (SMALL, SPLIT):
        with PoisonedAllocations():
            found = own_linear(stream, on_device(given), gated=gated, config=config)
        assert_close(found, exact(weighted.double() * factor, given, gated=gated))


@needs_gpu
@pytest.mark.parametrize(
    "config", [OneRowConfig(1, 4), OneRowConfig(4, 2), OneRowConfig(8, 1)], ids=str
)
@pytest.mark.parametrize("form", [*FORMS[:5], Form("int4", WHOLE, zeros=True)], ids=str)
def test_one_row_whose_weights_wait(form: Form, config: OneRowConfig) -> None:
    """Outputs do not fill the tiles, and the columns not the warps' last steps."""
    outputs, inputs, values = 200, 1832, Values(5)
    weighted = guarded(values.normal(1, inputs, dtype=DTYPE))
    squares = guarded(values.normal(1, 115, dtype=torch.float32, scale=4).square())
    norm = RmsNorm(poisoned(inputs, dtype=DTYPE), 1e-5)
    given = matrix_of(form, outputs, inputs, DTYPE)
    matrix, bias = on_device(given), guarded(values.normal(outputs, dtype=DTYPE))
    factor = (squares.double().sum(1, keepdim=True) / inputs + norm.eps).rsqrt()
    stream = Stream(poisoned(1, inputs, dtype=DTYPE), norm, BegunNorm(weighted, squares))
    with unchanged(weighted=weighted, words=matrix.words), PoisonedAllocations():
        found = own_linear(stream, matrix, bias, config=config)
    assert_close(found, exact(weighted.double() * factor, given, bias), 8)
    added = poisoned(1, outputs, dtype=DTYPE).copy_(values.normal(1, outputs, dtype=DTYPE))
    expected = exact(weighted, given, bias) + added.double()
    following = RmsNorm(guarded(values.normal(outputs, dtype=DTYPE)), 1e-5)
    with PoisonedAllocations():
        begun = add_own_linear(added, weighted, matrix, bias, norm=following, config=config)
    assert begun is not None
    assert_close(added, expected, 8)
    assert_close(begun.weighted, added.double() * following.weight.double(), 1)
    sums = [part.square().sum(1) for part in added.double().split(config.block_n, 1)]
    assert_close(begun.squares, torch.stack(sums, 1))


@needs_gpu
@pytest.mark.parametrize("outputs", [2048, 4096, 6144])
@pytest.mark.parametrize("form", [CHANNEL, Form("int4", 128, zeros=True)], ids=str)
def test_one_row_has_the_bits_of_several(form: Form, outputs: int) -> None:
    """Sizes of attention of Llama-3.1-8B, whose single row has a kernel of its own."""
    values = Values(outputs)
    matrix = on_device(matrix_of(form, outputs, 4096, DTYPE))
    assert isinstance(choose(1, matrix, False), OneRowConfig)
    x = values.normal(8, 4096, dtype=DTYPE)
    added = values.normal(8, outputs, dtype=DTYPE)
    alone = added[:1].clone()
    norm = RmsNorm(values.normal(outputs, dtype=DTYPE), 1e-5)
    add_coded_linear(added, x, matrix, None, norm)
    begun = add_coded_linear(alone, x[:1], matrix, None, norm)
    assert begun is not None
    assert same(alone, added[:1])
    assert same(coded_linear(x[:1], matrix, None), coded_linear(x, matrix, None)[:1])


# In the interpreter a product's order depends on its size.
@pytest.mark.parametrize(
    ("most", "inputs"),
    [
        (16, 400),
        pytest.param(MAX_ROWS, 400, marks=needs_gpu),
        # A program's part of these columns is long, so with many rows it has two tiles of W.
        pytest.param(MAX_ROWS, 14336, marks=needs_gpu),
    ],
)
@pytest.mark.parametrize("form", FORMS[:5], ids=str)
def test_a_row_depends_on_no_other(form: Form, most: int, inputs: int) -> None:
    """Check that NaN in a row stays there, and that bits do not depend on the number of rows."""
    values = Values(most)
    x = values.normal(most, inputs, dtype=DTYPE)
    x[most - 1] = float("nan")
    first = DeviceMatrix.of(matrix_of(form, 144, inputs, DTYPE))
    second = DeviceMatrix.of(matrix_of(form, 72, 144, DTYPE))
    stream = values.normal(most, 144, dtype=DTYPE, scale=7)
    norm = RmsNorm(values.normal(144, dtype=DTYPE), 1e-5)

    def chain(count: int) -> tuple[Tensor, Tensor]:
        added = stream[:count].clone()
        begun = add_coded_linear(added, x[:count], first, None, norm)
        return added, computed(coded_gated_linear(Stream(added, norm, begun), second, None))

    added, out = chain(most)
    assert added[-1].isnan().all() and out[-1].isnan().all()
    for count in (1, 5, most - 1):
        fewer_added, fewer = chain(count)
        assert same(fewer_added, added[:count])
        assert same(fewer, out[:count])


@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 33, 64, 300])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [(4096, 1024, False), (6144, 4096, False), (14336, 4096, True), (4096, 14336, False)],
)
def test_shapes_of_models_as_shipped(
    form: Form, outputs: int, inputs: int, gated: bool, rows: int
) -> None:
    values = Values(rows)
    x = guarded(values.normal(rows, inputs, dtype=DTYPE))
    given = matrix_of(form, outputs * (1 + gated), inputs, DTYPE)
    matrix = on_device(given)
    with PoisonedAllocations():
        found = computed((coded_gated_linear if gated else coded_linear)(x, matrix, None))
    assert_product(found, exact(x, given, gated=gated), form)


def test_parts_are_whole_tiles_and_about_equal() -> None:
    for rows in range(1, 10_000, 37):
        at_once = clustered_codes._at_once(rows)
        assert at_once % 256 == 0 and at_once <= 1.5 * clustered_codes._IN_L2
        parts = -(-rows // at_once)
        assert parts <= max(1, round(rows / clustered_codes._IN_L2))
