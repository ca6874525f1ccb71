"""The choice of the kernels of coded experts, by GPU, form and sizes."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.experts.common.experts_config import CodedConfigs, RegisterConfigs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.experts_triton import configs_in_codes
from sidestep.kernels.gpu import Gpu, like_gpu
from tests.triton.compiling.compile_quantized import Form, coded
from tests.triton.compiling.meta_tensors import bf16

BLOCKS, GROUPS_OF_32 = Form("fp8", (128, 128)), Form("int4", (1, 32))


@pytest.mark.parametrize(
    ("capability", "form", "width", "inner", "chosen", "few", "expected"),
    [
        (90, BLOCKS, 2048, 768, 8, True, RegisterConfigs),
        (90, Form("int4", (1, 128), zeros=True), 2880, 2880, 4, True, RegisterConfigs),
        (90, BLOCKS, 2048, 768, 8, False, CodedConfigs),
        # Older GPUs lack instructions that decode.
        (89, BLOCKS, 2048, 768, 8, True, CodedConfigs),
        (90, GROUPS_OF_32, 2048, 768, 8, True, CodedConfigs),
        # Rows that are not aligned or too long, more experts than warps, and too many steps.
        (90, BLOCKS, 2052, 768, 8, True, CodedConfigs),
        (90, BLOCKS, 2048, 764, 8, True, CodedConfigs),
        (90, BLOCKS, 7168, 2048, 8, True, CodedConfigs),
        (90, BLOCKS, 2048, 768, 17, True, CodedConfigs),
        (90, BLOCKS, 2048, 14336, 8, True, CodedConfigs),
    ],
)
def test_codes_come_from_registers_where_they_can(
    capability: int,
    form: Form,
    width: int,
    inner: int,
    chosen: int,
    few: bool,
    expected: type[RegisterConfigs] | type[CodedConfigs],
) -> None:
    with like_gpu(Gpu(capability, 132), "meta"):
        gate_up, down = (
            ExpertCodes.of(coded(form, *size)).room_for(32)
            for size in ((2 * inner, width), (width, inner))
        )
        found = configs_in_codes(bf16(1, width), chosen, gate_up, down, few=few)
    assert isinstance(found, expected)


def test_warps_have_the_same_shares_for_every_number_of_rows() -> None:
    """Else a row's bits would depend on the rows beside it."""
    with like_gpu(Gpu(90, 132), "meta"):
        for form in (BLOCKS, Form("int4", (1, 128))):
            gate_up, down = (
                ExpertCodes.of(coded(form, *size)).room_for(32)
                for size in ((1536, 2048), (2048, 768))
            )
            shares = set()
            for rows in (1, 2, 8):
                found = configs_in_codes(
                    torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta"),
                    4,
                    gate_up,
                    down,
                    few=True,
                )
                assert isinstance(found, RegisterConfigs)
                shares.add((found.gate_up.warps, found.down.warps))
            assert len(shares) == 1
