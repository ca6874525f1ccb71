"""Decode attention of many rows by the kernel for Hopper, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from sidestep.kernels.attention import decode_attention_triton
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.hopper import decode_hopper
from tests.triton.attention.projections import check_projections
from tests.triton.attention.test_decode_attention import check, launch
from tests.triton.batches import Batch, Shape, make_batch, with_scores, without_padding
from tests.triton.support import DTYPE, PoisonedAllocations, needs_hopper, poisoned, same

HALVES = [torch.bfloat16, torch.float16]
pytestmark = needs_hopper
LLAMA = Shape(8, 2, 128, 64)
SHAPES = [
    LLAMA,
    Shape(32, 4, 128, 64),
    Shape(14, 2, 64, 64),
    Shape(16, 2, 64, 128),
    Shape(7, 7, 128, 64),
    Shape(24, 2, 128, 32),
    Shape(16, 2, 256, 64),
    Shape(32, 2, 256, 16),
]


def scratch_of(batch: Batch, parts: int | None = None, *, read_once: bool = False) -> DecodeScratch:
    """Return poisoned scratch memory, for shares of as many blocks a head, or of the whole GPU."""
    shape = batch.shape
    config = DecodeConfig(tile=decode_hopper.TILE, min_tiles=1, read_once=read_once)
    with PoisonedAllocations():
        scratch = batch.scratch(config)
    assert scratch.hopper is not None and decode_hopper.takes(batch.cache, batch.cache.dtype)
    if parts is not None:
        scratch.hopper.blocks = parts * shape.kv_heads
    return scratch


def assert_nothing_is_left(scratch: DecodeScratch) -> None:
    """Check that the next launch finds no part of a row."""
    assert scratch.hopper is not None
    assert (scratch.hopper.parts == decode_hopper._NOT_THERE).all()


def check_all(batch: Batch, window: int = 0, parts: int | None = None) -> None:
    scratch = scratch_of(batch, parts)
    check(batch, scratch, window)
    assert_nothing_is_left(scratch)


@pytest.fixture(autouse=True)
def no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that another kernel would take."""
    monkeypatch.setattr(decode_attention_triton, "_decode", None)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [0, 1, 31, 32, 33, 300, 5000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_any_length(shape: Shape, window: int, dtype: torch.dtype) -> None:
    for lengths in ([1500], [1000, 1, 77, 32, 33, 640], [3000] + [5, 31, 64] * 20):
        check_all(make_batch(shape, lengths, dtype), window)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shape", [LLAMA, Shape(24, 2, 128, 32), Shape(8, 2, 64, 16)], ids=str)
def test_rows_cut_into_parts(shape: Shape, window: int, parts: int) -> None:
    for seed in range(3):
        lengths = [random.Random(seed * 10 + parts).randint(1, 2500) for _ in range(12)]
        check_all(make_batch(shape, [*lengths, 20_000], DTYPE), window, parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_that_are_read_once_give_the_same_bits(shape: Shape) -> None:
    batch = make_batch(shape, [1000, 1, 77, 32, 33, 640] * 5, DTYPE)
    often, once = (scratch_of(batch, 9, read_once=once) for once in (False, True))
    assert same(launch(batch, often, 0), launch(batch, once, 0))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 9, 12, 16])
def test_groups_of_query_heads(group: int) -> None:
    check_all(make_batch(Shape(2 * group, 2, 128, 64), [3, 70, 117, 260], DTYPE))


@pytest.mark.parametrize("page", [16, 32, 48, 64, 96, 128, 256])
def test_block_sizes(page: int) -> None:
    lengths = [page - 3, page, page + 1, 7 * page + 1, 3000]
    check_all(make_batch(Shape(4, 2, 128, page), lengths, DTYPE))


@pytest.mark.parametrize("rows", [1, 2, 17, 100, 500])
def test_numbers_of_rows(rows: int) -> None:
    lengths = [1 + 37 * row % 400 for row in range(rows)]
    check_all(make_batch(LLAMA, lengths, DTYPE))
    check_all(without_padding(make_batch(LLAMA, lengths, DTYPE)))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        Shape(32, 4, 128, 64),
        Shape(14, 2, 64, 64),
        Shape(6, 2, 128, 32),
        Shape(16, 2, 256, 16),
    ],
    ids=str,
)
def test_projections(
    shape: Shape, window: int, parts: int | None, dtype: torch.dtype, norms: bool
) -> None:
    batch = make_batch(shape, [1000, 1, 77, 32, 33, 640, 31, 65] * 4, dtype)
    check_projections(batch, scratch_of(batch, parts), window, with_norms=norms)


@pytest.mark.parametrize("sinks", [0.0, 9.0, -300.0, 300.0])
@pytest.mark.parametrize("window", [0, 19, 130])
@pytest.mark.parametrize("parts", [None, 2])
def test_sinks(window: int, sinks: float, parts: int | None) -> None:
    """Some sinks take nearly all the mass, or nearly none."""
    batch = make_batch(Shape(16, 2, 64, 64), [50, 200, 150, 2500], DTYPE)
    check_all(with_scores(batch, None, sinks), window, parts)


def test_prompt_rows_are_left_alone() -> None:
    check_all(make_batch(LLAMA, [40, 50, 33, 7, 90], DTYPE, [1, 1, 1, 4, 80]))


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_that_are_not_numbers(parts: int) -> None:
    """A block that waited for a number would wait for ever."""
    batch = make_batch(Shape(8, 2, 128, 64), [700, 900, 20, 3000], DTYPE)
    # NaN of values reach the sums. All bits are set, as in a part that is not there.
    batch.cache[:, batch.shape.kv_heads :].view(torch.int16)[:] = -1
    scratch = scratch_of(batch, parts)
    assert launch(batch, scratch, 0).isnan().all()
    assert_nothing_is_left(scratch)


def test_rows_that_many_blocks_share() -> None:
    """The last block adds up more than a hundred parts."""
    check_all(make_batch(Shape(4, 1, 128, 64), [20_000, 9_000], DTYPE))


def test_bits_are_the_same_in_each_launch() -> None:
    lengths = [1 + 131 * row % 3000 for row in range(150)]
    batch = make_batch(Shape(32, 4, 128, 64), lengths, DTYPE)
    scratch = scratch_of(batch)
    first = launch(batch, scratch, 0)
    for _ in range(20):
        assert same(launch(batch, scratch, 0), first)
        assert_nothing_is_left(scratch)
    check(batch, scratch)


def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    batch = make_batch(Shape(16, 8, 128, 64), [65, 300, 1290], DTYPE)
    small, far = batch.cache, 17_000
    batch.cache = poisoned(far + len(small), *small.shape[1:], dtype=torch.bfloat16)
    batch.cache[far:] = small
    batch.block_tables += far
    check_all(batch)
