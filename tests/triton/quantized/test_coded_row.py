"""The kernel for one row of coded experts gives the bits of those for several rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.coded_row import multiply_row, takes_row
from sidestep.kernels.experts.common.experts_config import RegisterConfigs, register_configs
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.ops.rms_norm import DoneProduct, RmsNorm, Stream
from sidestep.kernels.ops.routing import Choice, Joined, Routed, Undecided
from sidestep.kernels.products.coded_linear import coded_linear
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from tests.triton.quantized.coded_matrices import Form, guarded_codes, matrix_of
from tests.triton.quantized.test_coded_experts import EXPERTS, experts_of
from tests.triton.quantized.test_register_experts import FORMS, mxfp4
from tests.triton.support import (
    DEVICE,
    PoisonedAllocations,
    Values,
    int32,
    needs_hopper,
    unchanged,
    where_memory_ends,
)

pytestmark = needs_hopper
SIZES = [(1600, 400, 2), (2048, 768, 3), (640, 1152, 2), (2880, 1440, 1)]
"""Inputs, inner values and experts of a row. Some blocks have no item of gate and up, or of down;
some items have fewer steps than others."""


def compare(
    x: Tensor,
    routed: Routed | Undecided,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    *,
    add: bool = True,
    norm: RmsNorm | None = None,
    clamped: bool = False,
) -> Tensor:
    """Check that both kernels compute the same, and return it."""
    from sidestep.kernels.experts.coded_few_gluon import multiply_from_registers

    configs = configs_of(x, gate_up, routed.chosen)
    assert takes_row(x, routed, gate_up, down, configs)
    activation = (False, 1.702, 7.0) if clamped else (False, None, None)
    operands = gate_up, down, activation, configs
    expected = x.clone()
    begun = multiply_from_registers(x, routed, expected, *operands, add=add, some=False, norm=norm)
    # A launch leaves behind what the next one needs.
    for _ in range(3):
        with unchanged(x=x, words=gate_up.words, other_words=down.words), PoisonedAllocations():
            found = torch.empty_like(x).copy_(x)
            again = multiply_row(x, routed, found, *operands, add=add, norm=norm)
        assert expected.isfinite().all() and torch.equal(found, expected)
        assert (begun is None) == (again is None)
        for part, other in zip(again or (), begun or (), strict=True):
            assert torch.equal(part, other)
    return expected


def configs_of(x: Tensor, gate_up: ExpertCodes, chosen: int) -> RegisterConfigs:
    four_bits = gate_up.coding.kind in ("int4", "mxfp4")
    found = register_configs(1, x.shape[1], gate_up.num_rows // 2, chosen, four_bits=four_bits)
    assert found is not None
    return found


def choices(values: Values, chosen: int, experts: int = EXPERTS) -> Routed:
    ids = int32([values.different(chosen, experts)])
    return Routed(ids, values.normal(1, chosen, dtype=torch.float32))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_forms_and_sizes(form: Form, size: tuple[int, int, int]) -> None:
    width, inner, chosen = size
    values = Values(1)
    _, gate_up = experts_of(form, 2 * inner, width)
    _, down = experts_of(form, width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    weight = values.normal(width, dtype=torch.bfloat16)
    for add, norm in itertools.product(
        (False, True), (None, RmsNorm(weight, 1e-6), RmsNorm(weight.float(), 1e-6))
    ):
        compare(x, choices(values, chosen), gate_up, down, add=add, norm=norm)


@pytest.mark.parametrize(("width", "inner"), [(1440, 736), (2880, 2880), (256, 128)])
def test_mxfp4(width: int, inner: int) -> None:
    values = Values(2)
    x = values.normal(1, width, dtype=torch.bfloat16)
    gate_up = mxfp4(2 * inner, width, 1, values.normal(2 * inner, dtype=torch.bfloat16))
    down = mxfp4(width, inner, 2, values.normal(width, dtype=torch.bfloat16))
    norm = RmsNorm(values.normal(width, dtype=torch.bfloat16), 1e-6)
    for chosen in (1, 2, 3):
        compare(x, choices(values, chosen), gate_up, down, norm=norm, clamped=True)


@pytest.mark.parametrize("chosen", [1, 3, 8, 10])
@pytest.mark.parametrize("experts", [12, 40, 128])
def test_it_chooses_experts(experts: int, chosen: int) -> None:
    """The lowest index of equal logits is taken first."""
    values, width, inner = Values(experts), 256, 128
    form = Form("fp8", 128, 128)

    def stack(rows: int, columns: int) -> ExpertCodes:
        parts = [matrix_of(form, rows, columns, torch.bfloat16, seed) for seed in range(experts)]
        return guarded_codes([ExpertCodes.of(part) for part in parts])

    gate_up, down = stack(2 * inner, width), stack(width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    for normalised, bias in itertools.product((False, True), (False, True)):
        logits = values.normal(2, 1, experts, dtype=torch.float32)
        logits[..., experts // 2] = logits[..., experts // 3]
        added = values.normal(experts, dtype=torch.float32) if bias else None
        choice = Choice(chosen, normalised=normalised, scale=1.5)
        undecided = Undecided(logits, experts, choice, None, added, range(experts), None)
        compare(x, undecided, gate_up, down)


def test_it_reads_nothing_behind_a_short_row() -> None:
    """Blocks that have no item of the row have nothing to read of it, nor of the norm's weight."""
    values, (width, inner, chosen) = Values(8), (256, 128, 2)
    _, gate_up = experts_of(FORMS[0], 2 * inner, width)
    _, down = experts_of(FORMS[0], width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    norm = RmsNorm(where_memory_ends(values.normal(width, dtype=torch.bfloat16)), 1e-6)
    routed, found = choices(values, chosen), where_memory_ends(x)
    expected = compare(x, routed, gate_up, down, norm=norm)
    operands = gate_up, down, (False, None, None), configs_of(x, gate_up, chosen)
    multiply_row(x, routed, found, *operands, add=True, norm=norm)
    assert torch.equal(found, expected)


def test_values_that_are_no_numbers_arrive() -> None:
    """Blocks wait for words that are there, and a graph's padding may be NaN."""
    values, (width, inner, chosen) = Values(6), SIZES[1]
    _, gate_up = experts_of(FORMS[0], 2 * inner, width)
    _, down = experts_of(FORMS[0], width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    x[0, 5] = torch.nan
    operands = gate_up, down, (False, None, None), configs_of(x, gate_up, chosen)
    matrix = DeviceMatrix.of(matrix_of(FORMS[0], 1544, width, torch.bfloat16, 5))
    norm, routed = RmsNorm(torch.ones_like(x[0]), 1e-6), choices(values, chosen)
    for behind in (None, ProductBehind(matrix, crowded=True)):
        out = x.clone()
        done = multiply_row(x, routed, out, *operands, add=True, norm=norm, behind=behind)
        assert out.isnan().all()
        assert not isinstance(done, DoneProduct) or done.product.isnan().all()


def compare_behind(
    x: Tensor,
    routed: Routed,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    behind: ProductBehind,
    norm: RmsNorm,
) -> None:
    """Check that the product behind experts is that of the kernel for one row."""
    operands = gate_up, down, (False, None, None), configs_of(x, gate_up, routed.chosen)
    matrix, expected, found = behind.matrix, x.clone(), x.clone()
    begun = multiply_row(x, routed, expected, *operands, add=True, norm=norm)
    with unchanged(x=x, words=gate_up.words, codes=matrix.words), PoisonedAllocations():
        done = multiply_row(x, routed, found, *operands, add=True, norm=norm, behind=behind)
    assert isinstance(done, DoneProduct) and torch.equal(found, expected)
    product = coded_linear(Stream(expected, norm, begun), matrix, None)
    assert product.isfinite().all() and torch.equal(done.product, product)
    assert coded_linear(Stream(found, norm, done), matrix, None) is done.product


@pytest.mark.parametrize("rows", [8, 1544, 5120])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_product_behind(form: Form, size: tuple[int, int, int], rows: int) -> None:
    """It has the bits of the kernel that multiplies one row with a coded matrix."""
    width, inner, chosen = size
    values = Values(rows)
    _, gate_up = experts_of(form, 2 * inner, width)
    _, down = experts_of(form, width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    alike = replace(form, zeros=gate_up.coding.zeros)
    matrix = DeviceMatrix.of(matrix_of(alike, rows, width, torch.bfloat16, 5))
    norm = RmsNorm(values.normal(width, dtype=torch.bfloat16), 1e-6)
    for late in (False, True, False):
        behind = ProductBehind(matrix, crowded=late)
        compare_behind(x, choices(values, chosen), gate_up, down, behind, norm)


@pytest.mark.parametrize(
    ("inner", "chosen", "rows"), [(768, 8, 5120), (512, 11, 12288), (768, 4, 9216)]
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_product_behind_many_experts(form: Form, inner: int, chosen: int, rows: int) -> None:
    """Its codes fill the ring, where codes of down were."""
    values, width = Values(rows), 2048

    def stack(rows: int, columns: int) -> ExpertCodes:
        parts = [matrix_of(form, rows, columns, torch.bfloat16, seed) for seed in range(chosen)]
        return guarded_codes([ExpertCodes.of(part) for part in parts])

    gate_up, down = stack(2 * inner, width), stack(width, inner)
    x = values.normal(1, width, dtype=torch.bfloat16)
    alike = replace(form, zeros=gate_up.coding.zeros)
    matrix = DeviceMatrix.of(matrix_of(alike, rows, width, torch.bfloat16, 5))
    norm = RmsNorm(values.normal(width, dtype=torch.bfloat16), 1e-6)
    routed, behind = choices(values, chosen, chosen), ProductBehind(matrix, crowded=True)
    for _ in range(4):
        compare_behind(x, routed, gate_up, down, behind, norm)


@pytest.mark.parametrize("joined", [None, Joined(gated=False), Joined(gated=True)], ids=str)
@pytest.mark.parametrize("experts", [130, 512])
def test_it_chooses_among_many_experts(experts: int, joined: Joined | None) -> None:
    """Weights may differ in their last bit from those of the kernel that chooses for many rows."""
    values, (width, inner, chosen) = Values(experts), (256, 128, 10)
    form = Form("fp8", 128, 128)

    def stack(rows: int, columns: int) -> ExpertCodes:
        parts = [matrix_of(form, rows, columns, torch.bfloat16, seed) for seed in range(16)]
        coded = [ExpertCodes.of(part) for part in parts]
        return guarded_codes([coded[expert * 7 % 16] for expert in range(experts + 1)])

    operands = stack(2 * inner, width), stack(width, inner), (False, None, None)
    x = values.normal(1, width, dtype=torch.bfloat16)
    for normalised in (False, True):
        logits = values.normal(1, 1, experts + 4, dtype=torch.float32)
        logits[..., experts // 2] = logits[..., experts // 3] = 9.0
        choice = Choice(chosen, normalised=normalised, scale=1.5)
        undecided = Undecided(logits, experts, choice, None, None, range(experts), joined)
        outs = []
        for routed in (undecided, decided(undecided)):
            outs.append(torch.empty_like(x))
            configs = configs_of(x, operands[0], routed.chosen)
            assert takes_row(x, routed, *operands[:2], configs)
            with unchanged(x=x, logits=logits), PoisonedAllocations():
                multiply_row(x, routed, outs[-1], *operands, configs, add=False)
        assert outs[1].isfinite().all()
        torch.testing.assert_close(
            outs[0], outs[1], rtol=2**-7, atol=2**-8 * float(outs[1].abs().max())
        )


def test_all_launches_of_a_graph_are_alike() -> None:
    """Launches take turns with two places for inner values, and each clears the other's."""
    values, (width, inner, chosen) = Values(3), SIZES[1]
    _, gate_up = experts_of(FORMS[0], 2 * inner, width)
    _, down = experts_of(FORMS[0], width, inner)
    x, routed = values.normal(1, width, dtype=torch.bfloat16), choices(values, chosen)
    expected = compare(x, routed, gate_up, down, add=False)
    outs = [torch.zeros_like(x) for _ in range(32)]
    operands = gate_up, down, (False, None, None), configs_of(x, gate_up, chosen)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for out in outs:
            multiply_row(x, routed, out, *operands, add=False)
    for _ in range(20):
        for out in outs:
            out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


def test_float16() -> None:
    values, (width, inner, chosen) = Values(4), SIZES[0]

    def stack(form: Form, rows: int, columns: int) -> ExpertCodes:
        parts = [matrix_of(form, rows, columns, torch.float16, seed) for seed in range(EXPERTS)]
        return guarded_codes([ExpertCodes.of(part) for part in parts])

    x = values.normal(1, width, dtype=torch.float16)
    for form in FORMS:
        gate_up, down = stack(form, 2 * inner, width), stack(form, width, inner)
        compare(x, choices(values, chosen), gate_up, down)
