"""Decode attention and its plan against float64.

Batches are ragged, cut into tiles, and dealt out to any number of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention import decode_scratch
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig, decode_config
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from tests.triton.attention.projections import check_projections
from tests.triton.batches import (
    SCORES,
    Batch,
    Shape,
    assert_rows_untouched,
    make_batch,
    with_scores,
    without_padding,
)
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    INTERPRETED,
    PoisonedAllocations,
    Values,
    assert_close,
    needs_gpu,
    poisoned,
    same,
    unchanged,
)

MakeScratch = Callable[..., DecodeScratch]


@pytest.fixture
def scratch_for(monkeypatch: pytest.MonkeyPatch) -> MakeScratch:
    """Make scratch for a launch of exactly `parts` programs a KV head, on any device.

    All of it is poisoned.
    """

    def make(batch: Batch, parts: int, tile: int = 16, min_tiles: int = 1) -> DecodeScratch:
        shape = batch.shape
        monkeypatch.setattr(decode_scratch, "num_processors", lambda device: parts * shape.kv_heads)
        config = DecodeConfig(
            tile=tile, num_warps=4, num_stages=2, programs_per_processor=1, min_tiles=min_tiles
        )
        with PoisonedAllocations():
            return batch.scratch(config)

    return make


def launch(batch: Batch, scratch: DecodeScratch, window: int) -> Tensor:
    """Plan and decode, and return the decode rows.

    Check that inputs, other rows and the counters are unchanged.
    """
    out = batch.new_out()
    with unchanged(**batch.inputs), PoisonedAllocations():
        tile_ends, _ = batch.plan(scratch.config.tile, 16, window)
        decode_attention(
            batch.q,
            batch.cache,
            batch.block_tables,
            batch.slots,
            batch.seq_lens,
            tile_ends,
            out,
            scratch,
            num_heads=batch.shape.heads,
            window=window,
            scale=batch.shape.dim**-0.5,
            softcap=batch.softcap,
            sinks=batch.sinks,
        )
    assert not scratch.counters.any(), "a counter is left behind"
    assert_rows_untouched(batch, out, slice(batch.decode_tokens, None), "tokens of prompt rows")
    return out[: batch.decode_tokens]


def check(batch: Batch, scratch: DecodeScratch, window: int = 0) -> None:
    out = launch(batch, scratch, window)
    for row in range(batch.num_decode):
        assert_close(out[batch.tokens(row)], batch.expected(row, window))


# The plan.


def cumulative(counts: Sequence[int], size: int) -> list[int]:
    """Return the cumulative sums, padded to `size` with their last entry."""
    return [sum(counts[: i + 1]) for i in range(size)]


@pytest.mark.parametrize("window", [0, 1, 10, 16, 33, 1000])
@pytest.mark.parametrize("num_decode", [0, 3, 5])
@pytest.mark.parametrize(("tile", "tokens"), [(16, 5), (64, 1)])
def test_plan(window: int, num_decode: int, tile: int, tokens: int) -> None:
    counts = [1] * num_decode + [4, 1, 5, 6, 31][num_decode:]
    lengths = [1, 16, 170, 33, 400]
    batch = make_batch(
        Shape(),
        [max(pair) for pair in zip(lengths, counts, strict=True)],
        DTYPE,
        counts,
        num_decode,
    )
    decode, prefill = batch.plan(tile, tokens, window)
    first_tiles = [max(0, length - window) // tile if window else 0 for length in batch.lengths]
    tiles = [
        -(-length // tile) - first for length, first in zip(batch.lengths, first_tiles, strict=True)
    ]
    assert decode.tolist() == cumulative(tiles[:num_decode], 8)
    assert prefill.tolist() == cumulative(
        [0] * num_decode + [-(-n // tokens) for n in counts[num_decode:]], 8
    )


def test_plan_of_a_step_without_rows() -> None:
    batch = make_batch(Shape(), [5, 6], DTYPE)
    batch.header.fill_(0)
    assert [ends.tolist() for ends in batch.plan(16, 4, 0)] == [[0] * 8] * 2


# Attention.


RANDOM = [
    (Shape(4, 2, 64, 16), 4, 0),
    (Shape(3, 1, 80, 32), 7, 20),
    (Shape(6, 3, 16, 48), 2, 50),
    (Shape(8, 1, 128, 64), 5, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "parts", "window"), RANDOM, ids=str)
def test_random_batches(
    shape: Shape, parts: int, window: int, dtype: torch.dtype, scratch_for: MakeScratch
) -> None:
    lengths = Values(parts).integers(1, 100, 4)
    batch = make_batch(shape, lengths, dtype, seed=parts)
    check(batch, scratch_for(batch, parts, tile=32), window)


@pytest.mark.parametrize(
    ("page", "tile"),
    [
        (16, 16),
        (16, 64),
        (32, 16),
        (32, 32),
        (48, 16),
        (48, 32),
        (64, 32),
        (64, 64),
        (128, 64),
        (128, 128),
    ],
)
def test_lengths_around_the_borders_of_blocks(
    page: int, tile: int, scratch_for: MakeScratch
) -> None:
    """Cover lengths of one token, of whole blocks, of one token more and of one less."""
    batch = make_batch(Shape(page=page), [1, page - 1, page, page + 1, 2 * page], DTYPE)
    check(batch, scratch_for(batch, 3, tile))


@pytest.mark.parametrize("group", [*range(1, 9), 16, 20])
def test_groups_of_query_heads(group: int, scratch_for: MakeScratch) -> None:
    """Run each group with rows of one program and rows of several."""
    batch = make_batch(Shape(group, 1, 16), [1, 60, 16], DTYPE, seed=group)
    check(batch, scratch_for(batch, 3))


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int, scratch_for: MakeScratch) -> None:
    batch = make_batch(Shape(3, 1, dim), [1, 60, 16], DTYPE, seed=dim)
    check(batch, scratch_for(batch, 3))


@pytest.mark.parametrize("window", [1, 5, 15, 16, 17, 40, 64, 90, 1000])
def test_windows(window: int, scratch_for: MakeScratch) -> None:
    """Cover windows of one token, within a tile, of one and several tiles, and beyond all rows."""
    batch = make_batch(Shape(page=32), [1, 90, 16, 33], DTYPE, seed=window)
    check(batch, scratch_for(batch, 3), window)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 10, 11, 30])
def test_any_number_of_programs(parts: int, scratch_for: MakeScratch) -> None:
    """Deal 10 tiles out to any number of programs.

    All rows are in one program, several rows in one, or one row in several; there are as many
    programs as tiles, and more.
    """
    batch = make_batch(Shape(), [16, 80, 1, 31, 10], DTYPE)
    check(batch, scratch_for(batch, parts))


@pytest.mark.parametrize("min_tiles", [2, 5, 100])
def test_programs_may_be_given_a_least_number_of_tiles(
    min_tiles: int, scratch_for: MakeScratch
) -> None:
    batch = make_batch(Shape(), [20, 70, 3], DTYPE)
    check(batch, scratch_for(batch, 16, min_tiles=min_tiles))


@pytest.mark.parametrize(
    ("parts", "shape"),
    [(4, Shape(8, 1, 128)), (5, Shape(8, 1, 128)), (9, Shape(8, 1, 128)), (5, Shape(16, 1, 256))],
    ids=str,
)
def test_a_row_of_more_parts_than_are_combined_at_a_time(
    parts: int, shape: Shape, scratch_for: MakeScratch
) -> None:
    """Cover heads and groups whose size reduces the number of parts at a time."""
    batch = make_batch(shape, [7, 16 * parts - 18], DTYPE, seed=parts)
    check(batch, scratch_for(batch, parts))


@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
@pytest.mark.parametrize("window", [0, 19])
def test_bounded_scores_and_sinks(
    window: int, softcap: float | None, sinks: float | None, scratch_for: MakeScratch
) -> None:
    """Cover rows of one program, rows of several, and the new token that begins the softmax."""
    for shape, parts in ((Shape(3, 1, page=32), 1), (Shape(10, 2), 4)):
        batch = make_batch(shape, [1, 70, 16, 33], DTYPE, seed=parts)
        check(with_scores(batch, softcap, sinks), scratch_for(batch, parts), window)
    batch = make_batch(Shape(6, 2), [1, 60, 17], DTYPE)
    check_projections(with_scores(batch, softcap, sinks), scratch_for(batch, 3), window)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_arrays_without_room_to_spare(num_rows: int, scratch_for: MakeScratch) -> None:
    batch = without_padding(make_batch(Shape(), [40, 9, 16, 33, 1, 2, 17, 3][:num_rows], DTYPE))
    check(batch, scratch_for(batch, 3))


@pytest.mark.parametrize("num_decode", [0, 3])
def test_prompt_rows_are_not_decoded(num_decode: int, scratch_for: MakeScratch) -> None:
    batch = make_batch(
        Shape(), [40, 3, 20, 33, 8], DTYPE, [1] * num_decode + [3] * (5 - num_decode), num_decode
    )
    check(batch, scratch_for(batch, 3))


def test_a_step_without_rows_writes_nothing(scratch_for: MakeScratch) -> None:
    batch = make_batch(Shape(), [40, 3], DTYPE)
    batch.header.fill_(0)
    batch.num_decode, batch.counts = 0, [0, 0]
    launch(batch, scratch_for(batch, 3), window=0)


def test_scores_far_apart(scratch_for: MakeScratch) -> None:
    """Put all the weight on one key; others underflow.

    The key is in the first part, the last one, or one between.
    """
    batch = make_batch(Shape(1, 1, 16), [64] * 4, torch.float32)
    for row, position in enumerate([0, 20, 41, 63]):
        key = batch.q[row, :16] * 100
        batch.keys[row][position, 0] = key
        block = batch.block_tables[batch.slots[row], position // 16]
        batch.cache[block, 0, position % 16] = key
    check(batch, scratch_for(batch, 6))


@pytest.mark.parametrize(("parts", "window"), [(1, 0), (5, 0), (5, 21), (30, 0)])
def test_two_launches_with_one_scratch_give_the_same_bits(
    parts: int, window: int, scratch_for: MakeScratch
) -> None:
    """Run another batch between them, which leaves its own parts behind."""
    first = make_batch(Shape(), [50, 1, 17], DTYPE, seed=1)
    second = make_batch(Shape(), [5, 60, 2], DTYPE, seed=2)
    scratch = scratch_for(first, parts)
    out = launch(first, scratch, window)
    check(second, scratch, window)
    assert same(out, launch(first, scratch, window))


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs is the interpreter's to choose")
@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_programs_arrive_does_not_matter(
    seed: int, scratch_for: MakeScratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover each order in which programs may arrive.

    On a GPU any program may be the last to leave its part of a row; the interpreter runs them in
    turn.
    """
    from triton.runtime.interpreter import interpreter_builder

    batch = make_batch(Shape(2, 1), [50, 1, 90], DTYPE)
    scratch = scratch_for(batch, 5)
    in_turn = launch(batch, scratch, window=0)
    order = Values(seed).different(5, below=5) if seed else list(reversed(range(5)))
    set_grid_index = interpreter_builder.set_grid_idx

    def set_another(x: Any, *rest: Any) -> None:
        set_grid_index(order[x] if interpreter_builder.grid_dim[0] == 5 else x, *rest)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_another)
    assert same(in_turn, launch(batch, scratch, window=0))


# Attention of the projections as they come.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("shape", "parts", "window"), RANDOM, ids=str)
def test_projections_of_random_batches(
    shape: Shape,
    parts: int,
    window: int,
    with_norms: bool,
    dtype: torch.dtype,
    scratch_for: MakeScratch,
) -> None:
    lengths = Values(parts).integers(1, 100, 4)
    batch = make_batch(shape, lengths, dtype, seed=parts)
    check_projections(batch, scratch_for(batch, parts, tile=32), window, with_norms=with_norms)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("window", [0, 1, 16, 17])
def test_projections_where_the_new_token_is_alone_in_its_tile(
    window: int, with_norms: bool, scratch_for: MakeScratch
) -> None:
    """Cover lengths of one token, of whole tiles and blocks, and of one token more."""
    batch = make_batch(Shape(6, 2, 16, 32), [1, 16, 17, 32, 33, 65], DTYPE)
    for parts in (1, 3, 30):
        check_projections(batch, scratch_for(batch, parts), window, with_norms=with_norms)


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_projections_of_head_sizes(dim: int, scratch_for: MakeScratch) -> None:
    batch = make_batch(Shape(3, 1, dim), [1, 60, 16], DTYPE, seed=dim)
    check_projections(batch, scratch_for(batch, 3), with_norms=True)


def test_projections_beside_prompt_rows(scratch_for: MakeScratch) -> None:
    batch = make_batch(Shape(), [40, 3, 20, 33, 8], DTYPE, [1, 1, 1, 3, 3], 3)
    check_projections(batch, scratch_for(batch, 3))


# Sizes that are too large for the interpreter.


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 8, 128, 64),
        Shape(32, 8, 128, 64),
        Shape(32, 8, 128, 16),
        Shape(14, 2, 64, 64),
        Shape(8, 4, 256, 64),
        Shape(20, 1, 80, 48),
    ],
    ids=str,
)
def test_shapes_of_models_as_shipped(shape: Shape, window: int, dtype: torch.dtype) -> None:
    config = decode_config(shape.dim, dtype.itemsize, shape.heads)
    for lengths in (
        [5000],
        [1] * 40,
        Values(1).integers(1, 3000, 61),
        [*Values(2).integers(1, 99, 30), 9000],
    ):
        batch = make_batch(shape, lengths, dtype)
        with PoisonedAllocations():
            scratch = batch.scratch(config)
        check(batch, scratch, window)
        assert same(launch(batch, scratch, window), launch(batch, scratch, window))
        for with_norms in (False, True):
            check_projections(batch, scratch, window, with_norms=with_norms)


@needs_gpu
def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    shape = Shape(16, 8, 128, 64)
    batch = make_batch(shape, [65, 200], DTYPE)
    small, far = batch.cache, 17_000
    batch.cache = poisoned(far + len(small), *small.shape[1:], dtype=DTYPE)
    batch.cache[far:] = small
    batch.block_tables += far
    config = decode_config(shape.dim, DTYPE.itemsize, shape.heads)
    check(batch, DecodeScratch(16, 8, 128, len(batch.seq_lens), DEVICE, config))
