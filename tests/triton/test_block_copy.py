"""Copies of KV blocks: the torch form and the Triton one, against a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops import block_copy
from sidestep.kernels.triton import block_copy_triton
from tests.triton.support import (
    DEVICE,
    DTYPE,
    INTERPRETED,
    Values,
    assert_margins_untouched,
    guarded,
    int32,
    needs_gpu,
    same,
)

Copy = Callable[[Tensor, Tensor, Tensor], None]


def check(
    copy: Copy,
    layers: int,
    blocks: int,
    shape: tuple[int, ...],
    sources: list[int],
    targets: list[int],
    dtype: torch.dtype = DTYPE,
) -> None:
    caches = guarded(Values(layers + blocks).normal(layers, blocks, *shape, dtype=dtype))
    caches[:, blocks - 1] = float("nan")  # the contents of a block do not matter
    expected = caches.clone()
    for source, target in zip(sources, targets, strict=True):
        if source >= 0:
            expected[:, target] = caches[:, source]
    copy(caches, int32(sources), int32(targets))
    assert same(caches, expected)
    assert_margins_untouched(caches)


@pytest.fixture(
    params=[block_copy.copy_blocks, block_copy_triton.copy_blocks], ids=["torch", "triton"]
)
def copy(request: pytest.FixtureRequest) -> Copy:
    copy: Copy = request.param
    return copy


# Cover blocks smaller than a program's part, of several parts, and of a size that no part divides.
@pytest.mark.parametrize("shape", [(1,), (2, 16, 8), (2, 5, 7), (4, 16, 130)], ids=str)
def test_blocks_of_any_size(copy: Copy, shape: tuple[int, ...]) -> None:
    check(copy, 3, 7, shape, [5, 0, 6], [1, 4, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_negative_sources_are_skipped(copy: Copy, dtype: torch.dtype) -> None:
    check(copy, 2, 6, (2, 4, 8), [-1, 3, -7, 2], [0, 5, 1, 4], dtype)
    check(copy, 2, 6, (2, 4, 8), [-1, -1], [0, 0], dtype)


def test_one_block_may_be_copied_to_many(copy: Copy) -> None:
    check(copy, 1, 8, (2, 4, 8), [3, 3, 3, 0], [1, 7, 2, 5])


def test_nothing_to_copy(copy: Copy) -> None:
    check(copy, 1, 3, (2, 4, 8), [], [])


@pytest.mark.skipif(INTERPRETED, reason="chooses the Triton form on a GPU")
def test_the_torch_entry_launches_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(block_copy_triton, "copy_blocks", lambda *tensors: launched.append(tensors))
    block_copy.copy_blocks(torch.zeros(1, 2, 3, device=DEVICE), int32([0]), int32([1]))
    assert launched


@needs_gpu
def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    caches = torch.zeros(2, 1100, 1_000_003, dtype=torch.float16, device=DEVICE)
    caches[:, 1099] = torch.tensor([1.0, 2.0], device=DEVICE)[:, None]
    block_copy_triton.copy_blocks(caches, int32([1099]), int32([1098]))
    assert torch.equal(caches[:, 1098], caches[:, 1099])
    assert caches[1, 1099, -1] == 2 and not caches[:, :1098].any()
