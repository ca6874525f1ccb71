"""The experts' kernels that read codes straight into registers, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.coded_few_gluon import PAIRS
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import (
    CodedConfigs,
    RegisterConfig,
    RegisterConfigs,
    register_configs,
)
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.experts_triton import multiply_experts
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.ops.routing import Routed
from tests.triton.quantized.coded_matrices import WHOLE, Form
from tests.triton.quantized.test_coded_experts import EXPERTS, exact, experts_of
from tests.triton.support import (
    DEVICE,
    DTYPE,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    int32,
    needs_gpu,
)

pytestmark = needs_gpu

FORMS = [
    Form("fp8", 128, 128),
    Form("fp8", WHOLE),
    Form("int8", WHOLE),
    Form("int4", 128),
    Form("int4", 128, zeros=True),
    Form("int4", WHOLE, zeros=True),
]
WIDTH, INNER = 1600, 400
CONFIGS = [
    RegisterConfigs(RegisterConfig(warps, stages), RegisterConfig(down, stages, waits), rows)
    for (rows, warps, down), (stages, waits) in itertools.product(
        ((16, 4, 8), (32, 4, 16), (32, 8, 8)), ((1, False), (3, False), (1, True))
    )
]


def choices(values: Values, rows: int, chosen: int) -> Routed:
    """Return different experts for each row."""
    ids = int32([values.different(chosen, EXPERTS) for _ in range(rows)])
    return Routed(ids, values.normal(rows, chosen, dtype=torch.float32))


@pytest.mark.parametrize("configs", CONFIGS, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_configurations(form: Form, rows: int, configs: RegisterConfigs) -> None:
    values = Values(rows)
    x = guarded(values.normal(rows, WIDTH, dtype=DTYPE))
    gate_up, all_gate_up = experts_of(form, 2 * INNER, WIDTH)
    down, all_down = experts_of(form, WIDTH, INNER)
    routed = choices(values, rows, 2)
    out = guarded(torch.zeros(rows, WIDTH, dtype=DTYPE, device=DEVICE))
    with PoisonedAllocations():
        multiply_experts(x, routed, all_gate_up, all_down, out, add=True, configs=configs)
    assert_close(out, exact(x, routed, gate_up, down), ulps=16)


def mxfp4(rows: int, columns: int, seed: int, bias: Tensor) -> ExpertCodes:
    """Return experts' matrices of MXFP4."""
    values = torch.Generator(DEVICE).manual_seed(seed)

    def bytes_(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE, generator=values)

    stack = [
        ExpertCodes.of_mxfp4(
            ExpertMatrix(
                bytes_(0, 256, rows, columns // 2), bias, bytes_(118, 122, rows, columns // 32)
            )
        )
        for _ in range(EXPERTS)
    ]
    whole = stack[0].room_for(EXPERTS)
    for index, one in enumerate(stack):
        whole.put(index, one)
    return whole


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("configs", [*CONFIGS[:5], None], ids=str)
def test_mxfp4_is_as_by_the_other_kernels(rows: int, configs: RegisterConfigs | None) -> None:
    values, width, inner = Values(rows), 1440, 736
    x = guarded(values.normal(rows, width, dtype=torch.bfloat16))
    gate_up = mxfp4(2 * inner, width, 1, values.normal(2 * inner, dtype=torch.bfloat16))
    down = mxfp4(width, inner, 2, values.normal(width, dtype=torch.bfloat16))
    routed = choices(values, rows, 2)
    got, expected = torch.zeros_like(x), torch.zeros_like(x)
    used = configs or register_configs(rows, width, inner, 2, four_bits=True)
    with PoisonedAllocations():
        for out, c in ((got, used), (expected, CodedConfigs())):
            multiply_experts(
                x, routed, gate_up, down, out, add=True, clamped=(1.702, 7.0), configs=c
            )
    assert expected.isfinite().all()
    assert_close(got, expected.double(), ulps=16)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[2]], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(form: Form) -> None:
    """More rows than an expert's program takes choose the same experts."""
    values, rows = Values(2), 2 * PAIRS + 3
    x = values.normal(rows, WIDTH, dtype=DTYPE)
    _, gate_up = experts_of(form, 2 * INNER, WIDTH)
    _, down = experts_of(form, WIDTH, INNER)
    routed, norm = choices(values, rows, 2), RmsNorm(values.normal(WIDTH, dtype=DTYPE), 1e-6)

    def run(picked: slice) -> tuple[Tensor, ...]:
        out = x[picked].clone()
        begun = multiply_experts(
            x[picked].clone(),
            Routed(routed.ids[picked].contiguous(), routed.weights[picked].contiguous()),
            gate_up,
            down,
            out,
            add=True,
            few=True,
            norm=norm,
        )
        assert begun is not None
        return out, *begun

    whole = run(slice(None))
    for first, end in ((0, 1), (5, 7), (rows - 1, rows), (3, 3 + PAIRS + 1)):
        for part, expected in zip(run(slice(first, end)), whole, strict=True):
            assert torch.equal(part, expected[first:end])


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_experts_of_other_ranks_add_nothing(form: Form, rows: int) -> None:
    values = Values(rows)
    x = values.normal(rows, WIDTH, dtype=DTYPE)
    gate_up, all_gate_up = experts_of(form, 2 * INNER, WIDTH)
    down, all_down = experts_of(form, WIDTH, INNER)
    routed = choices(values, rows, 3)
    ids = torch.where(routed.ids == 1, -1, routed.ids)
    out = torch.zeros(rows, WIDTH, dtype=DTYPE, device=DEVICE)
    with PoisonedAllocations():
        multiply_experts(
            x, Routed(ids, routed.weights), all_gate_up, all_down, out,
            add=False, few=True, some=True,
        )  # fmt: skip
    kept = Routed(routed.ids, torch.where(routed.ids == 1, 0.0, routed.weights))
    assert_close(out, exact(x, kept, gate_up, down), ulps=16)
