"""Attention of prompt chunks by the kernel for Hopper, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from sidestep.kernels.attention.hopper import prefill_hopper
from sidestep.kernels.attention.prefill_attention_triton import HOPPER
from tests.triton.attention.test_prefill_attention import check, chunks, launch
from tests.triton.batches import Shape, with_scores, without_padding
from tests.triton.support import needs_hopper, poisoned, same

HALVES = [torch.bfloat16, torch.float16]
pytestmark = needs_hopper
LLAMA = Shape(8, 2, 128, 64)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [0, 1, 63, 64, 65, 300, 5000])
@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        Shape(32, 4, 128, 64),
        Shape(14, 2, 64, 64),
        Shape(16, 2, 64, 128),
        Shape(7, 7, 128, 64),
    ],
    ids=str,
)
def test_chunks_with_and_without_a_cached_prefix(
    shape: Shape, window: int, dtype: torch.dtype
) -> None:
    for rows in (
        [(0, 1500)],
        [(1000, 1), (77, 200), (0, 129), (640, 64)],
        [(3000, 300)] + [(5, 3)] * 20,
    ):
        batch = chunks(shape, rows, dtype=dtype)
        assert prefill_hopper.takes(batch.cache, dtype, shape.heads)
        check(batch, HOPPER, window, room=100)
        assert same(launch(batch, HOPPER, window), launch(batch, HOPPER, window))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20])
def test_groups_of_query_heads(group: int) -> None:
    check(chunks(Shape(2 * group, 2, 128, 64), [(3, 70), (117, 1), (0, 260)]), HOPPER)


@pytest.mark.parametrize("dtype", HALVES)
def test_lengths_around_the_borders_of_tiles(dtype: torch.dtype) -> None:
    """Cover chunks around tiles of 32 tokens and 64 keys, some hundred rows in a step."""
    borders = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129]
    rows = list(itertools.product([0, *borders], borders))
    check(chunks(LLAMA, rows, dtype=dtype), HOPPER)


@pytest.mark.parametrize("page", [16, 32, 48, 64, 96, 128, 256])
def test_block_sizes(page: int) -> None:
    rows = [(page - 3, 6), (page, 1), (0, page + 1), (5 * page + 1, 2 * page), (3000, 200)]
    check(chunks(Shape(4, 2, 128, page), rows), HOPPER)


@pytest.mark.parametrize("sinks", [0.0, 9.0, -300.0, 300.0])
@pytest.mark.parametrize("window", [0, 19, 130])
def test_sinks(window: int, sinks: float) -> None:
    """Some sinks take nearly all the mass, or nearly none."""
    batch = chunks(Shape(16, 2, 64, 64), [(50, 90), (0, 200), (150, 2)])
    check(with_scores(batch, None, sinks), HOPPER, window)


def test_decode_rows_are_left_alone() -> None:
    rows = [(20, 1), (0, 1), (33, 1), (7, 1), (3, 90)]
    for num_decode in (1, 2, 4):
        check(chunks(LLAMA, rows, num_decode), HOPPER)


def test_arrays_without_room_to_spare() -> None:
    for num_rows in (1, 2, 4):
        rows = [(20, 3), (9, 90), (0, 1), (1, 80)][:num_rows]
        check(without_padding(chunks(LLAMA, rows)), HOPPER)


def test_many_tiles_of_one_launch_and_many_launches() -> None:
    """Every processor takes several tiles, and each launch begins with the first one."""
    batch = chunks(LLAMA, [(0, 6000), (100, 4000), (64, 300)])
    first = launch(batch, HOPPER, 0)
    for _ in range(20):
        assert same(launch(batch, HOPPER, 0), first)
    check(batch, HOPPER)


def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    batch = chunks(Shape(16, 8, 128, 64), [(65, 30), (200, 129)])
    small, far = batch.cache, 17_000
    batch.cache = poisoned(far + len(small), *small.shape[1:], dtype=torch.bfloat16)
    batch.cache[far:] = small
    batch.block_tables += far
    check(batch, HOPPER)
