"""Decode attention of rows with several query tokens, as where drafts are verified.

Each token attends to the tokens up to itself. Fewer than all tokens of a row may be valid: then the
others' queries, and the cache from the first of them on, are not numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention import decode_scratch
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import (
    decode_attention,
)
from sidestep.kernels.attention.decode_config import DecodeConfig, decode_config
from sidestep.kernels.attention.decode_scratch import MOST_QUERIES, DecodeScratch
from sidestep.kernels.ops.paged_attention import causal_mask
from sidestep.kernels.ops.paged_attention import prefill_attention as reference_attention
from tests.triton.batches import (
    SCORES,
    Batch,
    Shape,
    assert_rows_untouched,
    make_batch,
    with_scores,
)
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_close,
    int32,
    needs_gpu,
    same,
    unchanged,
)

MakeScratch = Callable[..., DecodeScratch]
FAR = 1 << 24
"""A block id far behind the cache."""


@pytest.fixture
def scratch_for(monkeypatch: pytest.MonkeyPatch) -> MakeScratch:
    """Make poisoned scratch for launches of exactly `parts` programs a KV head, on any device."""

    def make(batch: Batch, parts: int, queries: int, tile: int = 16) -> DecodeScratch:
        shape = batch.shape
        monkeypatch.setattr(decode_scratch, "num_processors", lambda device: parts * shape.kv_heads)
        config = DecodeConfig(
            tile, 4, 2, programs_per_processor=1, min_tiles=1, min_tiles_of_several=1
        )
        with PoisonedAllocations():
            return batch.scratch(config, queries)

    return make


def rows_of(
    queries: int,
    shape: Shape,
    lengths: Sequence[int],
    dtype: torch.dtype = DTYPE,
    seed: int = 0,
) -> Batch:
    """Return a batch of decode rows with as many tokens each. Lengths are made long enough."""
    return make_batch(
        shape,
        [max(queries, length) for length in lengths],
        dtype,
        [queries] * len(lengths),
        len(lengths),
        seed,
    )


def launch(
    batch: Batch,
    scratch: DecodeScratch,
    queries: int,
    window: int = 0,
    valid_lens: Tensor | None = None,
) -> Tensor:
    """Plan and decode, and return the decode tokens. Check that nothing else is written."""
    out = batch.new_out()
    with unchanged(**batch.inputs), PoisonedAllocations():
        tile_ends, _ = batch.plan(scratch.config.tile, 16, window, queries)
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
            queries=queries,
            valid_lens=valid_lens,
        )
    assert not scratch.counters.any(), "a counter is left behind"
    assert_rows_untouched(batch, out, slice(batch.decode_tokens, None), "tokens of prompt rows")
    return out[: batch.decode_tokens]


def check(batch: Batch, scratch: DecodeScratch, queries: int, window: int = 0) -> None:
    out = launch(batch, scratch, queries, window)
    for row in range(batch.num_decode):
        assert_close(out[batch.tokens(row)], batch.expected(row, window))


def check_valid(
    batch: Batch, scratch: DecodeScratch, queries: int, valid: Sequence[int], window: int = 0
) -> None:
    """Check the valid tokens of rows, `valid[row]` of each.

    The other tokens' queries, keys and values are poisoned, and the entries of their own blocks.
    """
    expected = [batch.expected(row, window) for row in range(batch.num_decode)]
    page, lengths = batch.shape.page, []
    for row, count in enumerate(valid):
        lengths.append(batch.lengths[row] - queries + count)
        table = batch.block_tables[batch.slots[row]]
        for position in range(lengths[row], batch.lengths[row]):
            batch.cache[table[position // page], :, position % page] = float("nan")
        table[-(-lengths[row] // page) :] = FAR
        batch.q[batch.tokens(row)][count:] = float("nan")
    # Rows of padding look like long ones here too.
    valid_lens = int32([*lengths, *batch.seq_lens[len(lengths) :].tolist()])
    out = launch(batch, scratch, queries, window, valid_lens)
    for row, count in enumerate(valid):
        assert_close(out[batch.tokens(row)][:count], expected[row][:count])


@pytest.mark.parametrize("window", [0, 1, 10, 16, 33, 1000])
@pytest.mark.parametrize("queries", [2, 5, 8])
def test_the_plan_begins_at_the_first_query(window: int, queries: int) -> None:
    batch = rows_of(queries, Shape(), [1, 16, 17, 170, 33])
    ends, _ = batch.plan(16, 1, window, queries)
    counts = []
    for length in batch.lengths:
        first = max(0, length - queries + 1 - window) if window else 0
        counts.append(-(-length // 16) - first // 16)
    assert ends.tolist() == [sum(counts[: i + 1]) for i in range(8)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
def test_queries_and_groups(queries: int, group: int, dim: int, scratch_for: MakeScratch) -> None:
    """Cover rows within a tile, across tiles and split over programs."""
    batch = rows_of(queries, Shape(group, 1, dim), [1, 70, 16, 18], seed=queries)
    check(batch, scratch_for(batch, 3, queries), queries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "queries", "parts", "window"),
    [
        (Shape(4, 2, 64, 16), 4, 4, 0),
        (Shape(3, 1, 80, 32), 5, 7, 20),
        (Shape(6, 3, 16, 48), 2, 2, 50),
        (Shape(16, 1, 128, 64), 5, 5, 0),
        (Shape(2, 1, 256, 64), MOST_QUERIES, 3, 7),
    ],
    ids=str,
)
def test_random_batches(
    shape: Shape,
    queries: int,
    parts: int,
    window: int,
    dtype: torch.dtype,
    scratch_for: MakeScratch,
) -> None:
    batch = rows_of(queries, shape, Values(parts).integers(1, 100, 4), dtype, seed=parts)
    check(batch, scratch_for(batch, parts, queries, tile=32), queries, window)


@pytest.mark.parametrize("queries", [2, 5])
@pytest.mark.parametrize("window", [1, 3, 5, 15, 16, 17, 40, 90, 1000])
def test_windows(window: int, queries: int, scratch_for: MakeScratch) -> None:
    """Cover windows smaller than the number of queries, within a tile, and beyond all rows."""
    batch = rows_of(queries, Shape(page=32), [1, 90, 16, 33, 34, 37], seed=window)
    for parts in (1, 30):
        check(batch, scratch_for(batch, parts, queries), queries, window)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 10, 30])
def test_any_number_of_programs(parts: int, scratch_for: MakeScratch) -> None:
    """Cover programs of a tile that the first queries of a row do not see at all."""
    batch = rows_of(5, Shape(), [16, 80, 5, 33, 17, 20])
    check(batch, scratch_for(batch, parts, 5), 5)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("queries", [2, 5])
def test_what_is_not_valid_changes_no_valid_query(
    queries: int, window: int, parts: int, scratch_for: MakeScratch
) -> None:
    lengths = [1, 16, 17, 18, 20, 32, 33, 52, 64, 67]
    valid = [1 + (row % queries) for row in range(len(lengths))]
    for counts in (valid, valid[::-1], [queries] * len(lengths), [1] * len(lengths)):
        batch = rows_of(queries, Shape(), lengths, seed=window)
        check_valid(batch, scratch_for(batch, parts, queries), queries, counts, window)


@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
@pytest.mark.parametrize("window", [0, 19])
def test_bounded_scores_and_sinks(
    window: int, softcap: float | None, sinks: float | None, scratch_for: MakeScratch
) -> None:
    """Cover rows of one program and of several, and queries that are not valid."""
    for parts in (1, 4):
        batch = with_scores(rows_of(3, Shape(6, 2, page=32), [3, 60, 17]), softcap, sinks)
        check(batch, scratch_for(batch, parts, 3), 3, window)
        check_valid(batch, scratch_for(batch, parts, 3), 3, [1, 2, 3], window)


@pytest.mark.parametrize(("page", "tile"), [(16, 64), (48, 32), (128, 64)])
def test_valid_lengths_with_tiles_of_any_size(
    page: int, tile: int, scratch_for: MakeScratch
) -> None:
    lengths = [4, page, page + 1, page + 3, 2 * page + 2, 2 * tile + 1]
    batch = rows_of(4, Shape(page=page), lengths)
    check_valid(batch, scratch_for(batch, 4, 4, tile), 4, [1, 2, 3, 1, 2, 1])


@pytest.mark.parametrize("window", [0, 9])
def test_it_equals_the_reference_in_torch(window: int, scratch_for: MakeScratch) -> None:
    shape = Shape(8, 2, 64)
    batch = rows_of(5, shape, [5, 40, 64], torch.float32)
    out = launch(batch, scratch_for(batch, 3, 5), 5, window)
    for row, length in enumerate(batch.lengths):
        q = batch.q[batch.tokens(row), : shape.heads * shape.dim].view(5, shape.heads, shape.dim)
        expected = reference_attention(
            q,
            torch.cat([batch.keys[row], batch.values[row]], 1),
            causal_mask(length - 5, 5, length, window, DEVICE),
            shape.dim**-0.5,
        )
        torch.testing.assert_close(out[batch.tokens(row)], expected.flatten(1))


def test_launches_of_any_number_of_queries_share_scratch(scratch_for: MakeScratch) -> None:
    batches = {n: rows_of(n, Shape(4, 1, 64), [50, 1, 70], seed=n) for n in (5, 1, 3, 2, 4)}
    scratch = scratch_for(batches[5], 5, 5)
    outs = {queries: launch(batch, scratch, queries) for queries, batch in batches.items()}
    for queries, batch in batches.items():
        check(batch, scratch, queries)
        assert same(outs[queries], launch(batch, scratch, queries))


def test_decode_rows_beside_prompt_rows(scratch_for: MakeScratch) -> None:
    batch = make_batch(Shape(), [40, 3, 20, 33, 8], DTYPE, [3, 3, 3, 4, 8], 3)
    check(batch, scratch_for(batch, 3, 3), 3)


def test_more_queries_than_scratch_has_room_for_are_refused(scratch_for: MakeScratch) -> None:
    batch = rows_of(3, Shape(), [20])
    with pytest.raises(AssertionError):
        launch(batch, scratch_for(batch, 1, 2), 3)
    with pytest.raises(AssertionError):
        scratch_for(batch, 1, MOST_QUERIES + 1)


def test_keys_of_several_queries_must_be_in_the_cache_before(scratch_for: MakeScratch) -> None:
    batch = rows_of(2, Shape(), [20])
    with pytest.raises(AssertionError, match="one valid query"):
        decode_attention(
            batch.q,
            batch.cache,
            batch.block_tables,
            batch.slots,
            batch.seq_lens,
            batch.seq_lens,
            batch.new_out(),
            scratch_for(batch, 1, 2),
            num_heads=2,
            window=0,
            scale=1.0,
            rope=Rope(batch.q, batch.q, None, 1e-6),
            queries=2,
        )


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("queries", [2, 5, MOST_QUERIES])
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
def test_shapes_of_models_as_shipped(
    shape: Shape, queries: int, window: int, dtype: torch.dtype
) -> None:
    config = decode_config(shape.dim, dtype.itemsize, shape.heads)
    for lengths in (
        [5000],
        [1] * 40,
        Values(1).integers(1, 3000, 61),
        [*Values(2).integers(1, 99, 30), 9000],
    ):
        batch = rows_of(queries, shape, lengths, dtype)
        with PoisonedAllocations():
            scratch = batch.scratch(config, queries)
        check(batch, scratch, queries, window)
        assert same(
            launch(batch, scratch, queries, window), launch(batch, scratch, queries, window)
        )
        valid = [1 + count for count in Values(3).integers(0, queries, len(lengths))]
        check_valid(batch, scratch, queries, valid, window)
