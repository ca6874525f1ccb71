"""The experts' kernels with quantized matrices, against float64 of the decoded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.experts_triton import multiply_experts
from sidestep.kernels.experts.routing_triton import route
from sidestep.kernels.ops.routing import Choice, Joined, Routed, choose_experts
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, rounded_to_bytes
from tests.triton.quantized.coded_matrices import WHOLE, Form, guarded_codes, matrix_of
from tests.triton.support import (
    DEVICE,
    DTYPE,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    int32,
    unchanged,
)

FORMS = [
    Form("fp8", 128, 128),
    Form("fp8", WHOLE),
    Form("int8", WHOLE),
    Form("int8", 32),
    Form("int4", 128),
    Form("int4", 32, zeros=True),
    Form("int4", WHOLE, zeros=True),
]
EXPERTS = 3


def experts_of(form: Form, rows: int, columns: int) -> tuple[list[CodedMatrix], ExpertCodes]:
    """Return matrices, each by itself and all as the kernels read them."""
    given = [matrix_of(form, rows, columns, DTYPE, seed) for seed in range(EXPERTS)]
    return given, guarded_codes([ExpertCodes.of(matrix) for matrix in given])


def exact(x: Tensor, routed: Routed, gate_up: list[CodedMatrix], down: list[CodedMatrix]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (ids, weights) in enumerate(zip(*routed, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            both = gate_up[expert].decoded(torch.float32).double() @ x[token].double()
            gate, up = both.chunk(2)
            inner = gate / (1 + (-gate).exp()) * up
            out[token] += weight * (down[expert].decoded(torch.float32).double() @ inner)
    return out


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize(
    "form", [*FORMS, Form("int4", 32, minimums=True), Form("nf4", 64)], ids=str
)
@pytest.mark.parametrize("rows", [64, 128, 200])
def test_experts_repacked_together_are_those_repacked_one_by_one(
    form: Form, rows: int, nan: bool
) -> None:
    given = [matrix_of(form, rows, 256, DTYPE, seed) for seed in range(EXPERTS)]
    if nan and form.kind == "fp8":
        given[1].codes.view(torch.uint8)[rows - 1, 3] = 127
    together, apart = ExpertCodes.of_all(given), [ExpertCodes.of(one) for one in given]
    assert all(one.coding == together.coding for one in apart)
    assert torch.equal(together.words, torch.stack([one.words for one in apart]))
    scales = torch.stack([one.scales for one in apart])
    torch.testing.assert_close(together.scales, scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts(form: Form, rows: int, few: bool) -> None:
    width, inner = 272, 136
    values = Values(rows)
    x = guarded(values.normal(rows, width, dtype=DTYPE))
    gate_up, all_gate_up = experts_of(form, 2 * inner, width)
    down, all_down = experts_of(form, width, inner)
    ids = int32([values.different(2, EXPERTS) for _ in range(rows)])
    routed = Routed(ids, values.normal(rows, 2, dtype=torch.float32))
    out = guarded(torch.zeros(rows, width, dtype=DTYPE, device=DEVICE))
    with unchanged(x=x, gate_up=all_gate_up.words, down=all_down.words), PoisonedAllocations():
        multiply_experts(x, routed, all_gate_up, all_down, out, add=True, few=few)
    assert_close(out, exact(x, routed, gate_up, down), ulps=16)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
@pytest.mark.parametrize("joined", [None, Joined(gated=True)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_kernels_of_one_row_choose_its_experts(
    form: Form, rows: int, joined: Joined | None
) -> None:
    values, width, inner, choice = Values(3), 272, 136, Choice(2, normalised=True)
    experts = EXPERTS - (joined is not None)
    x = guarded(values.normal(rows, width, dtype=DTYPE))
    router = values.normal(EXPERTS, width, dtype=DTYPE)
    bias = guarded(values.normal(experts, dtype=torch.float32))
    gate_up, all_gate_up = experts_of(form, 2 * inner, width)
    down, all_down = experts_of(form, width, inner)
    out = guarded(torch.zeros(rows, width, dtype=DTYPE, device=DEVICE))
    undecided = route(x, router, None, choice, product_bias=bias, joined=joined)
    with PoisonedAllocations():
        multiply_experts(x, undecided, all_gate_up, all_down, out, add=False)
    logits = x.double() @ router.double().T
    chosen = (logits[:, :experts] + bias.double()).float().contiguous()
    routed = choose_experts(chosen, None, choice)
    if joined is not None:
        share = logits[:, experts:].sigmoid().float()
        ids = torch.full_like(routed.ids[:, :1], experts)
        routed = Routed(torch.cat([routed.ids, ids], 1), torch.cat([routed.weights, share], 1))
    assert_close(out, exact(x, routed, gate_up, down), ulps=16)


@pytest.mark.parametrize(("inner", "bad"), [(256, range(128)), (128, [7])])
def test_a_code_that_is_nan_stays_in_its_block(inner: int, bad: Sequence[int]) -> None:
    """Where a block has all columns, its rows have scales of their own."""
    gate_up, all_gate_up = experts_of(FORMS[0], 2 * inner, 256)
    down, _ = experts_of(FORMS[0], 256, inner)
    broken = down[1].codes.view(torch.uint8).clone()
    broken[7, 5] = 0xFF
    parts = [down[0], replace(down[1], codes=broken.view(torch.float8_e4m3fn)), down[2]]
    all_down = guarded_codes([ExpertCodes.of(part) for part in parts])
    x = Values(0).normal(2, 256, dtype=DTYPE)
    routed = Routed(int32([[0], [1]]), torch.ones(2, 1, device=DEVICE))
    expected = exact(x, routed, gate_up, down)
    for few in (True, False):
        out = torch.zeros_like(x)
        multiply_experts(x, routed, all_gate_up, all_down, out, add=False, few=few)
        assert out.isnan().nonzero().tolist() == [[1, column] for column in bad]
        assert_close(out[0], expected[0], ulps=16)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(
    "form",
    [
        Form("int4", 32, minimums=True),
        Form("int8", 32, minimums=True),
        Form("nf4", 64),
        Form("fp4", 16),
        Form("fp4", 32, 2),
    ],
    ids=str,
)
def test_forms_that_no_kernel_reads_become_bytes(form: Form, few: bool) -> None:
    """Compare with the numbers of the bytes, and those with the numbers of the form."""
    width, inner = 272, 136
    values = Values(3)
    gate_up, all_gate_up = experts_of(form, 2 * inner, width)
    down, all_down = experts_of(form, width, inner)
    assert all_gate_up.coding.kind == all_down.coding.kind == "int8"
    in_bytes = [[rounded_to_bytes(one) for one in own] for own in (gate_up, down)]
    for own, rounded in zip(gate_up + down, sum(in_bytes, []), strict=True):
        plain, found = own.decoded(torch.float32), rounded.decoded(torch.float32)
        if form.kind == "fp4":
            assert torch.equal(found, plain)
        assert bool(((found - plain).abs() <= plain.abs().amax(1, keepdim=True) / 254).all())
    x = guarded(values.normal(3, width, dtype=DTYPE))
    ids = int32([values.different(2, EXPERTS) for _ in range(3)])
    routed = Routed(ids, values.normal(3, 2, dtype=torch.float32))
    out = guarded(torch.zeros(3, width, dtype=DTYPE, device=DEVICE))
    with PoisonedAllocations():
        multiply_experts(x, routed, all_gate_up, all_down, out, add=True, few=few)
    assert_close(out, exact(x, routed, *in_bytes), ulps=16)


def test_groups_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="int4 in groups of 24 cannot be multiplied on a GPU"):
        ExpertCodes.of(matrix_of(Form("int4", 24), 8, 48, DTYPE))
