"""The stream of experts' matrices computes the same in any order of threads and copies."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sidestep.kernels.experts.common.sorted_pairs_triton import sort_pairs
from sidestep.kernels.experts.streamed_pairs import Form
from tests.triton.cuda_on_threads.building import runs_here
from tests.triton.cuda_on_threads.stream_on_threads import build, multiply
from tests.triton.products.test_expert_clusters import SILU, exact
from tests.triton.support import INTERPRETED, Values, assert_close, int32

pytestmark = pytest.mark.skipif(
    not (INTERPRETED and runs_here()), reason="needs g++ and an x86-64 processor, and no GPU"
)
ORDERS = [(1, 2000), (2, 50000)]
"""Seeds, and how hasty copies are."""
AHEAD, LATE = Form(torch.bfloat16, 16, True, 2, SILU), Form(torch.bfloat16, 48, False, 2, SILU)
"""Blocks that load before the pairs are sorted, and others."""
EACH_ONCE = [[0, 1], [1, 2], [2, 3], [3, 0]] * 3
CHOICES = {
    "a tile of each expert": EACH_ONCE,
    "none of the first expert": [[1, 2], [3, 2]] * 6,
    "many tiles of the first expert": [[0, expert] for expert in (1, 2, 3)] * 30,
    "one expert": [[-1, 3]] * 5,
    "no pair": [[-1, -1]] * 3,
}
"""Experts of each row, of four."""


class Layer(NamedTuple):
    """Experts, whose inner values and results end within an item, as their columns do in a step."""

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor]


def layer(width: int = 328, inner: int = 200, experts: int = 4) -> Layer:
    values = Values(width)

    def numbers(*shape: int) -> Tensor:
        return values.normal(*shape, dtype=torch.bfloat16, scale=shape[-1] ** -0.5)

    biases = numbers(experts, 2 * inner), numbers(experts, width)
    return Layer(numbers(experts, 2 * inner, width), numbers(experts, width, inner), biases)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Form, ctypes.CDLL]:
    def folder(form: Form) -> Path:
        return tmp_path_factory.mktemp(f"pairs{form.pairs}")

    return {form: build(form, folder(form)) for form in (AHEAD, LATE)}


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("form", [AHEAD, LATE], ids=["ahead", "late"])
def test_any_order(
    libraries: dict[Form, ctypes.CDLL], form: Form, choice: str, blocks: int
) -> None:
    ids, (gate_up, down, biases) = int32(CHOICES[choice]), layer()
    x = Values(7).normal(len(ids), down.shape[1], dtype=torch.bfloat16)
    given = biases if form.bias else None
    wanted = exact(x, ids, list(gate_up), list(down), given, SILU, codes=False)
    pairs, there = sort_pairs(ids, len(down), form.pairs), ids.flatten() >= 0
    found = [
        multiply(
            libraries[form],
            form,
            x,
            pairs,
            gate_up,
            down,
            given,
            blocks=blocks,
            seed=seed,
            haste=haste,
        )
        for seed, haste in ORDERS
    ]
    assert_close(found[0][there], wanted[there], ulps=16)
    assert torch.equal(found[0][there], found[1][there])
    assert bool(found[0][~there].isnan().all()), "written where there is no pair"
