"""Reads of experts that L2 is asked for ahead of their products."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels import gpu
from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.experts_triton import read_first
from sidestep.kernels.launch import cdiv

PROCESSORS = 132
needs_compiler = pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")


def matrices(
    experts: int, width: int, inner: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[ExpertMatrix, ExpertMatrix]:
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    gate_up, down = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return ExpertMatrix(gate_up), ExpertMatrix(down)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_of", lambda _: gpu.Gpu(90, PROCESSORS))
    monkeypatch.setattr(
        "sidestep.kernels.experts.streamed_pairs.num_processors", lambda _: PROCESSORS
    )


@needs_compiler
@pytest.mark.parametrize(
    ("experts", "width", "inner", "chosen"),
    [(128, 2048, 768, 8), (8, 4096, 14336, 2), (512, 2048, 512, 10), (64, 2048, 1408, 6)],
)
def test_they_are_the_first_rows_of_blocks(
    experts: int, width: int, inner: int, chosen: int
) -> None:
    gate_up, down = matrices(experts, width, inner)
    x = torch.empty(cdiv(8 * experts, chosen), width, dtype=torch.bfloat16, device="meta")
    read = read_first(x, chosen, gate_up, down, experts)
    assert read is not None and 0 < read.nbytes <= 24 << 20
    # A block begins with 128 rows of a gate and of the other half behind it.
    parts, asked = cdiv(inner, 128), len(read)
    begun = {(block // parts, block % parts) for block in range(PROCESSORS)}
    for place in range(asked):
        row = (read.storage_offset() + place * read.stride(0)) // width
        assert row % inner == 0 and (row // inner // 2, 0) in begun
    assert read.shape[1:] == (min(128, inner), width) and read[0].is_contiguous()
    # Both halves of an expert, or none.
    assert asked % 2 == 0


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (8, torch.bfloat16),  # most experts have no pair
        (60, torch.bfloat16),  # some have none
        (1024, torch.bfloat16),  # clusters multiply, which do not wait for the memory
        (256, torch.float32),
    ],
)
def test_nothing_is_asked_for_that_may_not_be_read(rows: int, dtype: torch.dtype) -> None:
    gate_up, down = matrices(128, 2048, 768, dtype)
    x = torch.empty(rows, 2048, dtype=dtype, device="meta")
    assert read_first(x, 8, gate_up, down, 128) is None
