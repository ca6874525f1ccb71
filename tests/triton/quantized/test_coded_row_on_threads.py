"""The kernel for one row of coded experts computes the same in any order of threads and copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.coded_row import _matrix
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.row_form import NOTHING_BEHIND, Behind, Choosing, Ending, Form
from sidestep.kernels.ops.routing import Choice, Routed, choose_experts
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from tests.triton.cuda_on_threads.building import runs_here
from tests.triton.cuda_on_threads.row_on_threads import Row, build
from tests.triton.quantized import coded_matrices
from tests.triton.quantized.coded_matrices import WHOLE, matrix_of
from tests.triton.quantized.test_coded_experts import exact
from tests.triton.support import INTERPRETED, assert_close

pytestmark = pytest.mark.skipif(
    not (INTERPRETED and runs_here()), reason="needs g++ and an x86-64 processor, and no GPU"
)
BFLOAT16, EPS = torch.bfloat16, 1e-6
FP8, FP8_BLOCKS = coded_matrices.Form("fp8", WHOLE), coded_matrices.Form("fp8", 128, 128)
INT8, INT4 = coded_matrices.Form("int8", WHOLE), coded_matrices.Form("int4", 128, zeros=True)
ORDERS = [(1, 2000), (2, 50000)]
"""Seeds, and how hasty copies are."""


class Size(NamedTuple):
    """Numbers of a row and of inner values, experts, results behind them, and processors."""

    width: int
    inner: int
    chosen: int
    behind: int
    blocks: int


QWEN3_30B, QWEN3_NEXT = Size(2048, 768, 8, 5120, 132), Size(2048, 512, 11, 12288, 132)
SMALL, ALONE = Size(1600, 400, 3, 1544, 40), Size(640, 1152, 2, 0, 20)


@dataclass(frozen=True)
class Layer:
    """Experts of a row, and what comes behind them."""

    gate_up: list[CodedMatrix]
    down: list[CodedMatrix]
    behind: CodedMatrix | None
    row: Tensor
    before: Tensor
    norm: Tensor

    def expected(self, routed: Routed) -> Tensor:
        """Return the new row, in float64."""
        return self.before.double() + exact(self.row, routed, self.gate_up, self.down)

    def product(self, out: Tensor) -> Tensor:
        """Return the product behind the experts, of the row that they gave."""
        assert self.behind is not None
        wide = out.double()[0]
        weighted = (wide * self.norm.double()).to(BFLOAT16).double()
        factor = (wide.square().mean() + EPS).rsqrt()
        return self.behind.decoded(torch.float32).double() @ weighted * factor


def layer_of(form: coded_matrices.Form, size: Size, experts: int) -> Layer:
    width, inner, _, rows, _ = size
    random = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(BFLOAT16)

    return Layer(
        [matrix_of(form, 2 * inner, width, BFLOAT16, seed) for seed in range(experts)],
        [matrix_of(form, width, inner, BFLOAT16, seed) for seed in range(experts)],
        matrix_of(form, rows, width, BFLOAT16, 99) if rows else None,
        numbers(1, width),
        numbers(1, width),
        numbers(width),
    )


def kernel_of(layer: Layer, size: Size, folder: Path, choosing: Choosing) -> Row:
    """Return the kernel for a layer with all operands but the experts and their weights."""
    gate_up, down = (ExpertCodes.of_all(parts) for parts in (layer.gate_up, layer.down))
    behind, matrix = NOTHING_BEHIND, None
    if layer.behind is not None:
        matrix = DeviceMatrix.of(layer.behind)
        height, group = matrix.group
        behind = Behind(matrix.shape[0], group, height, split=size.width // 512, late=True)
    form = Form(
        BFLOAT16,
        gate_up.coding.kind,
        gate_up.coding.zeros,
        size.chosen,
        _matrix(size.width, gate_up),
        _matrix(size.inner, down),
        shares=1,
        blocks=size.blocks,
        activation=(False, None, None),
        choosing=choosing,
        ending=Ending(True, True, False),
        behind=behind,
    )
    assert form.fits
    operands = dict.fromkeys(("gate_up_bias", "down_bias", "logit_bias")) | {
        "x": layer.row,
        "gate_up": gate_up.words,
        "down": down.words,
        "gate_up_scales": gate_up.scales.contiguous(),
        "down_scales": down.scales.contiguous(),
        "out": layer.before.clone(),
        "next_norm": layer.norm,
        "next_weighted": torch.empty(1, size.width, dtype=BFLOAT16),
        "next_squares": torch.empty(size.width // 8),
        "exchanged": torch.full((2, form.exchanged), 255, dtype=torch.uint8),
        "counter": torch.zeros(1, dtype=torch.int32),
        "behind": matrix.words if matrix else None,
        "behind_scales": matrix.scales if matrix else None,
        "behind_out": torch.empty(size.behind, dtype=BFLOAT16),
    }
    return Row(form, build(form, folder), operands, EPS)


def check(layer: Layer, kernel: Row, routed: Routed) -> None:
    """Check that all orders give the same, and that it is right."""
    found = []
    for seed, haste in ORDERS:
        out = layer.before.clone()
        results = kernel.launch(seed, haste, out=out)
        found.append((out, *results))
        assert all(torch.equal(one, first) for one, first in zip(found[-1], found[0], strict=True))
    out, weighted, sums, product = found[0]
    assert_close(out, layer.expected(routed), ulps=16)
    if layer.behind is not None:
        assert_close(product, layer.product(out), ulps=16)
    else:
        assert torch.equal(weighted, (out.float() * layer.norm.float()).to(BFLOAT16))
        torch.testing.assert_close(sums.sum(), out.float().square().sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [SMALL, ALONE], ids=str)
@pytest.mark.parametrize("form", [FP8, FP8_BLOCKS, INT8, INT4], ids=str)
def test_forms(form: coded_matrices.Form, size: Size, tmp_path: Path) -> None:
    layer = layer_of(form, size, size.chosen)
    kernel = kernel_of(layer, size, tmp_path, Choosing())
    random = torch.Generator().manual_seed(1)
    ids = torch.randperm(size.chosen, generator=random)
    routed = Routed(ids[None].int(), torch.rand(1, size.chosen, generator=random))
    kernel.operands.update(ids=routed.ids, weights=routed.weights, parts=None)
    check(layer, kernel, routed)


@pytest.mark.parametrize(("form", "size"), [(FP8, QWEN3_30B), (FP8_BLOCKS, QWEN3_NEXT)], ids=str)
def test_codes_that_fill_the_ring_again_and_again(
    form: coded_matrices.Form, size: Size, tmp_path: Path
) -> None:
    """These are layers of Qwen3-30B-A3B and of Qwen3-Next-80B-A3B."""
    test_forms(form, size, tmp_path)


def test_it_chooses_experts(tmp_path: Path) -> None:
    experts, layer = 40, layer_of(FP8, SMALL, 40)
    kernel = kernel_of(layer, SMALL, tmp_path, Choosing(2, experts, experts, normalised=True))
    parts = torch.randn(2, experts, generator=torch.Generator().manual_seed(2))
    kernel.operands.update(ids=None, weights=None, parts=parts)
    choice = Choice(SMALL.chosen, normalised=True)
    check(layer, kernel, choose_experts(parts.sum(0, keepdim=True), None, choice))
