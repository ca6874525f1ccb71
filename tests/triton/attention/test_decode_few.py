"""Decode attention of few rows, by the kernel whose last programs take parts as they come.

The references are those of tests/triton/attention/test_decode_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestep.kernels.attention import decode_attention_triton, decode_few
from sidestep.kernels.attention.decode_config import DecodeConfig, FewConfig, few_config
from sidestep.kernels.attention.few_sums_gluon import ABSENT
from sidestep.kernels.launch import has_pdl
from tests.triton.attention.projections import check_projections
from tests.triton.batches import SCORES, Batch, Shape, make_batch, with_scores, without_padding
from tests.triton.support import DEVICE, DTYPE, PoisonedAllocations, Values

pytestmark = pytest.mark.skipif(not has_pdl(DEVICE), reason="needs a GPU like Hopper or later")

Check = Callable[..., None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check launches of `parts` programs a KV head, and that they clear their scratch.

    No other kernel may run.
    """

    def run(
        batch: Batch,
        parts: int,
        tile: int = 32,
        window: int = 0,
        *,
        stages: int = 2,
        min_tiles: int = 1,
        with_norms: bool = False,
        launches: int = 1,
    ) -> None:
        shape = batch.shape
        for module in (decode_attention_triton, decode_few):
            monkeypatch.setattr(module, "num_processors", lambda device: parts * shape.kv_heads)
        monkeypatch.setattr(decode_attention_triton, "_decode", None)
        few = FewConfig(tile, stages, programs_per_processor=1, min_tiles=min_tiles)
        config = DecodeConfig(tile=16, programs_per_processor=1, few=few)
        with PoisonedAllocations():
            scratch = batch.scratch(config)
        assert scratch.few is not None
        for _ in range(launches):
            check_projections(batch, scratch, window, with_norms=with_norms)
            for left in (scratch.few.partial, scratch.few.stats):
                assert bool((left == ABSENT.value).all()), "a part is left behind"

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "parts", "window"),
    [
        (Shape(4, 2, 64, 32), 16, 0),
        (Shape(6, 2, 128, 32), 16, 45),
        (Shape(8, 1, 128, 128), 30, 0),
        (Shape(5, 5, 64, 64), 17, 100),
        (Shape(16, 2, 256, 64), 40, 0),
    ],
    ids=str,
)
def test_random_batches(
    shape: Shape, parts: int, window: int, dtype: torch.dtype, check: Check
) -> None:
    lengths = Values(parts).integers(1, 500, 4)
    batch = make_batch(shape, lengths, dtype, seed=parts)
    check(batch, parts, window=window, with_norms=True)


@pytest.mark.parametrize("window", [0, 1, 32, 33])
def test_lengths_around_the_borders_of_tiles(window: int, check: Check) -> None:
    """Cover lengths of one token, of whole tiles and blocks, and of one token more.

    The new token may be alone in its tile. There are more programs than tiles, or fewer.
    """
    batch = make_batch(Shape(6, 2, 64, 64), [1, 32, 33, 64, 65, 129], DTYPE)
    for parts in (32, 60):
        check(batch, parts, window=window)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 12, 16])
def test_groups_of_query_heads(group: int, check: Check) -> None:
    batch = make_batch(Shape(group, 1, 128, 64), [1, 300, 90], DTYPE, seed=group)
    check(batch, 16)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [64, 65, 640, 1900])
def test_rows_of_any_number_of_parts(length: int, stages: int, check: Check) -> None:
    """Cover rows of one part, of parts of several tiles, and of more parts than are taken at once.

    A second launch takes the scratch as the first one left it. More parts are taken at once
    where there is a single row.
    """
    for lengths in ([length], [length, 1, 5]):
        check(make_batch(Shape(2, 1, 128, 64), lengths, DTYPE), 40, stages=stages, launches=2)


@pytest.mark.parametrize("dim", [64, 128])
def test_as_many_rows_as_take_this_kernel(dim: int, check: Check) -> None:
    few = few_config(dim, 2, 32, 8, coded=True)
    assert few is not None
    lengths = Values(dim).integers(1, 1500, few.most_rows)
    check(make_batch(Shape(4, 1, dim, 64), lengths, DTYPE), 66, stages=few.stages, launches=2)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_launch_ends(rows: int, check: Check) -> None:
    """Launch often: a program that misses a part, while another clears it, waits for ever."""
    check(make_batch(Shape(8, 1, 128, 64), [1000] * rows, DTYPE), 66, launches=200)


@pytest.mark.parametrize("tile", [16, 64])
def test_other_tiles(tile: int, check: Check) -> None:
    batch = make_batch(Shape(4, 1, 128, 64), [1, 17, 64, 65, 300], DTYPE)
    check(batch, 20, tile=tile, window=70)


def test_programs_may_be_given_a_least_number_of_tiles(check: Check) -> None:
    check(make_batch(Shape(4, 2, 64, 32), [20, 470, 3], DTYPE), 16, min_tiles=4)


@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
def test_bounded_scores_and_sinks(softcap: float | None, sinks: float | None, check: Check) -> None:
    batch = make_batch(Shape(6, 2, 64, 32), [1, 60, 170], DTYPE)
    check(with_scores(batch, softcap, sinks), 16, window=50)


def test_scores_far_apart(check: Check) -> None:
    """Put all the weight on one key, whose part may be any; others underflow."""
    batch = make_batch(Shape(1, 1, 64, 32), [256] * 4, DTYPE)
    for row, position in enumerate([0, 70, 130, 200]):
        key = torch.full([64], 30.0, dtype=DTYPE, device=DEVICE)
        batch.keys[row][position, 0] = key
        batch.cache[batch.block_tables[batch.slots[row], position // 32], 0, position % 32] = key
    check(batch, 16)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_arrays_without_room_to_spare(num_rows: int, check: Check) -> None:
    lengths = [40, 9, 16, 33, 1, 2, 170, 3][:num_rows]
    check(without_padding(make_batch(Shape(4, 2, 64, 32), lengths, DTYPE)), 16)


def test_beside_prompt_rows(check: Check) -> None:
    batch = make_batch(Shape(4, 2, 64, 32), [40, 3, 20, 33, 8], DTYPE, [1, 1, 1, 3, 3], 3)
    check(batch, 16)
