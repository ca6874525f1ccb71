"""Memory in large pages: tensors have places of their own, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sidestep.kernels.native import large_pages
from sidestep.kernels.native.large_pages import (
    empty_in_large_pages,
    in_large_pages,
    pages_of_their_own,
)

PAGE = 2 << 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_last", None)


def test_tensors_keep_their_numbers_beside_each_other() -> None:
    rng, kept = random.Random(1), list[tuple[Tensor, Tensor]]()
    for i in range(60):
        shape = rng.choice([(3,), (0, 4), (17, 33), (1000, 1000), (700_000,)])
        tensor = torch.full(shape, float(i), dtype=rng.choice([torch.float32, torch.bfloat16]))
        kept.append((tensor, in_large_pages(tensor.t() if tensor.dim() == 2 else tensor)))
        if rng.random() < 0.3:
            kept.pop(rng.randrange(len(kept)))
    for tensor, copy in kept:
        assert torch.equal(copy, tensor.t() if tensor.dim() == 2 else tensor)
        assert copy.data_ptr() % 64 == 0 and copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes


def test_small_tensors_share_pages_and_large_ones_begin_with_one() -> None:
    first = empty_in_large_pages((1000,), torch.uint8)
    second = empty_in_large_pages((1000,), torch.uint8)
    assert first.data_ptr() % PAGE == 0 and second.data_ptr() - first.data_ptr() == 1024
    large = empty_in_large_pages((40 * PAGE,), torch.uint8)
    assert large.data_ptr() % PAGE == 0
    own = pages_of_their_own((3, 5, 7))
    assert own.data_ptr() % PAGE == 0 and own.shape == (3, 5, 7) and not own.any()


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not tell the memory of a process")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_goes_back_when_the_last_tensor_is_gone() -> None:
    before = resident()
    tensors = [empty_in_large_pages((8 << 20,), torch.uint8).fill_(1) for _ in range(16)]
    small = [empty_in_large_pages((100_000,), torch.uint8).fill_(1) for _ in range(16)]
    assert resident() - before > 120 << 20
    del tensors
    gc.collect()
    assert resident() - before < 24 << 20, "small tensors keep no large one's memory"
    del small
    gc.collect()
    assert large_pages._last is not None and large_pages._last[0]() is None


def test_the_last_page_takes_no_more_than_it_needs() -> None:
    before = resident()
    tensors = [empty_in_large_pages((9 << 20,), torch.uint8).fill_(1) for _ in range(40)]
    assert resident() - before < 40 * (9 << 20) + (20 << 20)
    assert len(tensors) == 40
