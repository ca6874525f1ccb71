"""Attention of prompt chunks against float64.

Chunks have a cached prefix or none, and end around the borders of tiles.
"""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig, decode_config
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.prefill_attention_triton import (
    PrefillConfig,
    prefill_attention,
    prefill_config,
)
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
    Values,
    assert_close,
    needs_gpu,
    poisoned,
    same,
    unchanged,
)


def config(rows: int = 16, keys: int = 16) -> PrefillConfig:
    """Use small tiles, so that short chunks have several."""
    return PrefillConfig(rows=rows, keys=keys, num_warps=4, num_stages=2)


def launch(batch: Batch, tiles: PrefillConfig, window: int, room: int = 0) -> torch.Tensor:
    """Plan and attend. Check that inputs and other rows than prompt rows are unchanged.

    room: tokens and rows that the launch provides for beyond the step's own.
    """
    out, shape = batch.new_out(), batch.shape
    with unchanged(**batch.inputs):
        _, tile_ends = batch.plan(16, tiles.tokens(shape.group), window)
        prefill_attention(
            batch.q,
            batch.cache,
            batch.block_tables,
            batch.slots,
            batch.seq_lens,
            batch.query_starts,
            tile_ends,
            out,
            tiles,
            num_heads=shape.heads,
            max_tokens=sum(batch.counts) - batch.decode_tokens + room,
            max_rows=len(batch.lengths) - batch.num_decode + room,
            window=window,
            scale=shape.dim**-0.5,
            softcap=batch.softcap,
            sinks=batch.sinks,
        )
    assert_rows_untouched(batch, out, slice(0, batch.decode_tokens), "tokens of decode rows")
    return out[: sum(batch.counts)]


def check(
    batch: Batch,
    tiles: PrefillConfig | None = None,
    window: int = 0,
    room: int = 0,
    float32_ulps: float = 16,
) -> None:
    out = launch(batch, tiles or config(), window, room)
    for row in range(batch.num_decode, len(batch.lengths)):
        assert_close(out[batch.tokens(row)], batch.expected(row, window), float32_ulps=float32_ulps)


def chunks(
    shape: Shape, rows: list[tuple[int, int]], num_decode: int = 0, dtype: torch.dtype = DTYPE
) -> Batch:
    """Check one batch. rows: cached tokens and new ones."""
    return make_batch(
        shape,
        [cached + new for cached, new in rows],
        dtype,
        [new for _, new in rows],
        num_decode,
        seed=len(rows) + shape.group,
    )


RANDOM = [
    (Shape(4, 2, 64, 16), 0),
    (Shape(3, 1, 80, 32), 20),
    (Shape(2, 2, 16, 48), 50),
    (Shape(8, 1, 128, 64), 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "window"), RANDOM, ids=str)
def test_random_chunks(shape: Shape, window: int, dtype: torch.dtype) -> None:
    values = Values(shape.dim)
    rows = list(zip(values.integers(0, 60, 3), values.integers(1, 30, 3), strict=True))
    check(chunks(shape, rows, dtype=dtype), config(32, 32), window)


@pytest.mark.parametrize("cached", [0, 15, 16, 17, 40])
@pytest.mark.parametrize("new", [1, 8, 9, 17])
def test_chunks_around_the_borders_of_tiles(cached: int, new: int) -> None:
    """Cover chunks around tiles of 8 tokens and 16 keys."""
    check(chunks(Shape(2, 1), [(cached, new)]))


@pytest.mark.parametrize(
    ("page", "keys"), [(16, 32), (32, 16), (48, 16), (48, 32), (64, 64), (128, 32)]
)
def test_block_sizes(page: int, keys: int) -> None:
    check(chunks(Shape(page=page), [(page - 3, 6), (page, 1), (0, page + 1)]), config(64, keys))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20])
def test_groups_of_query_heads(group: int) -> None:
    """Cover groups that divide the rows of a tile, that do not, and that are larger."""
    check(chunks(Shape(group, 1), [(3, 4), (17, 1), (0, 6)]), config(16, 16))


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int) -> None:
    check(chunks(Shape(3, 1, dim), [(20, 7), (0, 3)]))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 16, 17, 31, 40, 1000])
def test_windows(window: int) -> None:
    """Cover windows around the sizes of both kinds of tiles.

    A window has one token, is smaller than a tile of queries or of keys, or is longer than the
    rows.
    """
    check(chunks(Shape(2, 1, page=32), [(50, 9), (0, 20), (15, 2)]), config(16, 16), window)


@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
@pytest.mark.parametrize("window", [0, 19])
def test_bounded_scores_and_sinks(window: int, softcap: float | None, sinks: float | None) -> None:
    batch = chunks(Shape(10, 2, page=32), [(50, 9), (0, 20), (15, 2)])
    check(with_scores(batch, softcap, sinks), window=window)


@pytest.mark.parametrize("window", [0, 3, 33])
def test_tiles_of_keys_smaller_and_larger_than_those_of_queries(window: int) -> None:
    batch = chunks(Shape(1, 1, page=64), [(5, 70)])
    for rows, keys in [(64, 16), (16, 64)]:
        check(batch, config(rows, keys), window)


@pytest.mark.parametrize("num_decode", [1, 2, 4])
def test_decode_rows_are_left_alone(num_decode: int) -> None:
    """The header alone decides whether chunks of one token are decode rows."""
    check(chunks(Shape(), [(20, 1), (0, 1), (33, 1), (7, 1), (3, 9)], num_decode))


@pytest.mark.parametrize("room", [0, 1, 30])
def test_launches_may_provide_for_more_tokens_and_rows(room: int) -> None:
    check(chunks(Shape(), [(20, 1), (9, 9), (0, 1), (1, 8)], num_decode=1), room=room)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_arrays_without_room_to_spare(num_rows: int) -> None:
    check(without_padding(chunks(Shape(), [(20, 3), (9, 9), (0, 1), (1, 8)][:num_rows])))


@pytest.mark.parametrize("num_decode", [0, 3])
def test_a_step_without_chunks_writes_nothing(num_decode: int) -> None:
    batch = make_batch(Shape(), [20, 3, 40], DTYPE)
    batch.header[:2] = num_decode
    batch.num_decode, batch.counts = num_decode, [1] * num_decode + [0] * (3 - num_decode)
    launch(batch, config(), window=0, room=8)


def test_scores_far_apart() -> None:
    """Put all the weight on one key; others underflow.

    The key is the first, the last, or the query's own.
    """
    batch = chunks(Shape(1, 1), [(30, 12)], dtype=torch.float32)
    for token, position in [(0, 0), (1, 31), (5, 29), (11, 3)]:
        key = batch.q[token, :16] * 50
        batch.keys[0][position, 0] = key
        batch.cache[batch.block_tables[batch.slots[0], position // 16], 0, position % 16] = key
    # Scores in the hundreds have a rounding error that is larger by the same factor.
    check(batch, float32_ulps=1000)


def test_chunking_does_not_change_what_a_token_attends_to() -> None:
    """Compare a whole prompt with the same prompt in two chunks."""
    whole = chunks(Shape(), [(0, 21)])
    out = launch(whole, config(), window=0)
    rest = chunks(Shape(), [(9, 12)])
    rest.cache, rest.block_tables, rest.slots = whole.cache, whole.block_tables, whole.slots
    rest.q[:12] = whole.q[9:21]
    torch.testing.assert_close(launch(rest, config(), window=0)[:12], out[9:21])


@pytest.mark.parametrize("window", [0, 18])
def test_decode_rows_and_chunks_of_one_step_fill_one_output(window: int) -> None:
    """Use one plan and two launches, as a step does. One of them writes each token."""
    batch, tiles = (
        chunks(Shape(4, 2), [(20, 1), (0, 1), (33, 1), (7, 1), (3, 9)], num_decode=3),
        config(),
    )
    scratch = DecodeScratch(4, 2, 16, len(batch.seq_lens), DEVICE, DecodeConfig(16, 4, 2, 1))
    decode_ends, prefill_ends = batch.plan(16, tiles.tokens(2), window)
    out = batch.new_out()
    common = (batch.q, batch.cache, batch.block_tables, batch.slots, batch.seq_lens)
    decode_attention(*common, decode_ends, out, scratch, num_heads=4, window=window, scale=0.25)
    prefill_attention(
        *common,
        batch.query_starts,
        prefill_ends,
        out,
        tiles,
        num_heads=4,
        max_tokens=10,
        max_rows=2,
        window=window,
        scale=0.25,
    )
    for row in range(5):
        assert_close(out[batch.tokens(row)], batch.expected(row, window))
    assert_rows_untouched(batch, out, slice(0, 0), "nothing")


# Sizes that are too large for the interpreter.


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 8, 128, 64),
        Shape(32, 8, 128, 64),
        Shape(32, 8, 128, 16),
        Shape(14, 2, 64, 64),
        Shape(8, 4, 256, 64),
        Shape(20, 4, 80, 48),
    ],
    ids=str,
)
def test_shapes_of_models_as_shipped(shape: Shape, window: int, dtype: torch.dtype) -> None:
    tiles = prefill_config(shape.dim, dtype.itemsize)
    for rows in (
        [(0, 1500)],
        [(1000, 1), (77, 200), (0, 129), (640, 64)],
        [(3000, 300)] + [(5, 3)] * 20,
    ):
        batch = chunks(shape, rows, dtype=dtype)
        check(batch, tiles, window, room=100)
        assert same(launch(batch, tiles, window), launch(batch, tiles, window))


@needs_gpu
@pytest.mark.parametrize("shape", [Shape(16, 8, 128, 64), Shape(8, 4, 64, 32)], ids=str)
def test_a_mixed_step_as_shipped(shape: Shape) -> None:
    values = Values(7)
    rows = [(n, 1) for n in values.integers(1, 2500, 50)] + [(300, 500), (0, 64), (9, 1)]
    batch, window = chunks(shape, rows, num_decode=50), 0
    tiles, decode = prefill_config(shape.dim, 2), decode_config(shape.dim, 2, shape.heads)
    scratch = batch.scratch(decode)
    decode_ends, prefill_ends = batch.plan(decode.tile, tiles.tokens(shape.group), window)
    out, scale = batch.new_out(), shape.dim**-0.5
    common = (batch.q, batch.cache, batch.block_tables, batch.slots, batch.seq_lens)
    for _ in range(3):  # the launches follow one another at once, as in a graph
        decode_attention(
            *common, decode_ends, out, scratch, num_heads=shape.heads, window=window, scale=scale
        )
        prefill_attention(
            *common,
            batch.query_starts,
            prefill_ends,
            out,
            tiles,
            num_heads=shape.heads,
            max_tokens=2000,
            max_rows=20,
            window=window,
            scale=scale,
        )
    for row in range(len(rows)):
        assert_close(out[batch.tokens(row)], batch.expected(row, window))
    assert_rows_untouched(batch, out, slice(0, 0), "nothing")


@needs_gpu
def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    batch = chunks(Shape(16, 8, 128, 64), [(65, 30), (200, 129)])
    small, far = batch.cache, 17_000
    batch.cache = poisoned(far + len(small), *small.shape[1:], dtype=DTYPE)
    batch.cache[far:] = small
    batch.block_tables += far
    check(batch, prefill_config(128, DTYPE.itemsize))
