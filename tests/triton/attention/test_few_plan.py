"""The list of work of decode attention of few rows."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.attention import decode_few
from sidestep.kernels.attention.decode_config import FewConfig
from sidestep.kernels.attention.few_plan_triton import COLUMNS, plan_few
from tests.triton.batches import Shape, make_batch
from tests.triton.support import DEVICE, DTYPE, assert_margins_untouched, poisoned, unchanged

TILE = 16


def planned(
    lengths: list[int], parts: int, window: int = 0, min_tiles: int = 1, page: int = 32
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the parts and the rows of a batch, whose rows need not be in the order of their slots.

    Slots, lengths and the blocks of tiles are checked here.
    """
    batch = make_batch(Shape(page=page), lengths, DTYPE)
    ends, _ = batch.plan(TILE, 16, window)
    work = poisoned(parts + len(ends), COLUMNS, dtype=torch.int32)
    with unchanged(**batch.inputs, ends=ends):
        plan_few(
            ends,
            batch.seq_lens,
            batch.slots,
            batch.block_tables,
            work,
            tile=TILE,
            page=page,
            window=window,
            min_tiles=min_tiles,
        )
    assert_margins_untouched(work)
    listed: list[list[int]] = []
    for row, slot, length, tile, stop, _, *blocks in work[:parts].tolist():
        if row < 0:
            listed.append([row])
            continue
        assert slot == batch.slots[row] and length == lengths[row]
        table = batch.block_tables[slot]
        tiles = (tile, min(tile + 1, stop - 1))
        assert blocks == [int(table[index * TILE // page]) for index in tiles]
        listed.append([row, tile, stop])
    rows: list[list[int]] = []
    for index, (row, slot, length, first, end, *_) in enumerate(work[parts:].tolist()):
        assert row == (index if index < len(lengths) else -1)
        if row >= 0:
            assert slot == batch.slots[row] and length == lengths[row]
            rows.append([first, end])
    return listed, rows


@pytest.mark.parametrize("window", [0, 1, 16, 40])
@pytest.mark.parametrize("parts", [32, 33, 100])
@pytest.mark.parametrize(
    "lengths",
    [[1], [1024], [160] * 8, [3, 900, 1, 17, 5, 16, 2], [1, 16, 17, 32, 33, 65]],
    ids=str,
)
def test_each_tile_of_each_row_is_in_one_part(lengths: list[int], parts: int, window: int) -> None:
    """Tiles are those of the tokens of earlier steps: a row of one token has no part."""
    listed, rows = planned(lengths, parts, window)
    busy = [entry for entry in listed if entry[0] >= 0]
    assert listed == busy + [[-1]] * (parts - len(busy))
    sizes = []
    for row, length in enumerate(lengths):
        own = [(part, entry) for part, entry in enumerate(busy) if entry[0] == row]
        first, end = rows[row]
        assert [part for part, _ in own] == list(range(first, end))
        at = max(0, length - window) // TILE if window else 0
        for _, (_, tile, stop) in own:
            assert tile == at and stop > tile
            sizes.append(stop - tile)
            at = stop
        assert at == -(-(length - 1) // TILE)
    # No part is larger than an even share, but for what rows do not share.
    assert max(sizes, default=0) <= -(-sum(sizes) // (parts - 16)) + 1


def test_the_least_number_of_tiles_is_kept_to() -> None:
    listed, rows = planned([100], 32, min_tiles=4)
    assert listed == [[0, 0, 4], [0, 4, 7], *[[-1]] * 30]
    assert rows == [[0, 2]]


def test_as_many_parts_as_there_are_serve_long_rows() -> None:
    assert planned([512], 32)[0] == [[0, tile, tile + 1] for tile in range(32)]


def test_too_few_parts_are_refused() -> None:
    with pytest.raises(AssertionError, match="too many rows"):
        planned([10] * 8, 15)


@pytest.mark.parametrize(
    ("processors", "kv_heads", "rows"),
    [(132, 2, 16), (132, 8, 16), (132, 16, 8), (78, 8, 9), (132, 132, 1)],
)
def test_each_row_of_few_may_have_four_parts(
    processors: int, kv_heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_few, "num_processors", lambda device: processors)
    config = FewConfig(programs_per_processor=4, most_rows=16)
    scratch = decode_few.FewScratch(2 * kv_heads, kv_heads, 64, DEVICE, config)
    assert scratch.most_rows == rows
