"""Decode attention over codes of 8 bits by the kernel that decodes them in registers.

The references are those of tests/triton/attention/test_kv_codes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sidestep.kernels.attention import decode_attention_triton, decode_scratch
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.launch import has_pdl
from tests.triton.attention.coded_cache import coded
from tests.triton.batches import (
    SCORES,
    Batch,
    Shape,
    assert_rows_untouched,
    make_batch,
    with_scores,
    without_padding,
)
from tests.triton.support import DEVICE, DTYPE, PoisonedAllocations, Values, assert_close, unchanged

pytestmark = pytest.mark.skipif(not has_pdl(DEVICE), reason="needs a GPU like Hopper or later")

CONFIG = DecodeConfig(tile=32, num_warps=2, num_stages=3, min_tiles=1)
Check = Callable[..., None]
both_formats = pytest.mark.parametrize("name", ["fp8", "int8"])


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check launches of `parts` programs a KV head, and that they clear their counters.

    No other kernel may run. size: that of the values.
    """

    def run(
        batch: Batch,
        name: str,
        parts: int = 5,
        window: int = 0,
        *,
        config: DecodeConfig = CONFIG,
        launches: int = 1,
        size: float = 1.0,
    ) -> None:
        batch, cache = coded(batch, name)
        shape = batch.shape
        monkeypatch.setattr(decode_scratch, "num_processors", lambda device: parts * shape.kv_heads)
        monkeypatch.setattr(decode_attention_triton, "_decode", None)
        with PoisonedAllocations():
            scratch = batch.scratch(replace(config, programs_per_processor=1))
        ends, _ = batch.plan(config.tile, 16, window)
        for _ in range(launches):
            out = batch.new_out()
            with unchanged(**batch.inputs, codes=cache.codes, numbers=cache.numbers):
                decode_attention(
                    batch.q,
                    cache,
                    batch.block_tables,
                    batch.slots,
                    batch.seq_lens,
                    ends,
                    out,
                    scratch,
                    num_heads=shape.heads,
                    window=window,
                    scale=shape.dim**-0.5,
                    softcap=batch.softcap,
                    sinks=batch.sinks,
                )
            assert not bool(scratch.counters.any()), "a counter is left"
            assert_rows_untouched(batch, out, slice(batch.decode_tokens, None), "prompts")
            for row in range(batch.num_decode):
                expected = batch.expected(row, window) / size
                got = (out[batch.tokens(row)].float() / size).to(out.dtype)
                assert_close(got, expected, ulps=8)

    return run


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "parts", "window"),
    [
        (Shape(4, 2, 64, 32), 5, 0),
        (Shape(6, 2, 128, 32), 9, 45),
        (Shape(16, 1, 128, 128), 30, 0),
        (Shape(5, 5, 64, 64), 17, 100),
    ],
    ids=str,
)
def test_random_batches(
    shape: Shape, parts: int, window: int, dtype: torch.dtype, name: str, check: Check
) -> None:
    lengths = Values(parts).integers(1, 500, 4)
    check(make_batch(shape, lengths, dtype, seed=parts), name, parts, window)


@both_formats
@pytest.mark.parametrize("window", [0, 1, 32, 33])
def test_lengths_around_the_borders_of_tiles(window: int, name: str, check: Check) -> None:
    """Cover lengths of one token, of whole tiles and blocks, and of one token more.

    There are more programs than tiles, or fewer.
    """
    batch = make_batch(Shape(6, 2, 64, 64), [1, 32, 33, 64, 65, 129], DTYPE)
    for parts in (1, 4, 32):
        check(batch, name, parts, window)


@both_formats
@pytest.mark.parametrize("group", [1, 2, 3, 8, 12])
def test_groups_of_query_heads(group: int, name: str, check: Check) -> None:
    check(make_batch(Shape(group, 1, 128, 64), [1, 300, 90], DTYPE, seed=group), name)


@both_formats
@pytest.mark.parametrize(("tile", "warps", "stages"), [(32, 1, 2), (64, 4, 4), (64, 2, 3)])
@pytest.mark.parametrize("length", [64, 65, 1900])
def test_rows_of_any_number_of_parts(
    length: int, tile: int, warps: int, stages: int, name: str, check: Check
) -> None:
    """Cover rows of one part, of parts of several tiles, and of more parts than are taken at once.

    A second launch takes the counters as the first one left them.
    """
    batch = make_batch(Shape(2, 1, 128, 64), [length, 7], DTYPE)
    config = DecodeConfig(tile=tile, num_warps=warps, num_stages=stages, min_tiles=1)
    for parts in (1, 3, 70):
        check(batch, name, parts, config=config, launches=2)


@both_formats
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e4, 1e30])
def test_queries_of_any_size(size: float, name: str, check: Check) -> None:
    """Queries lie outside float16's range, but for the factor that brings them there."""
    batch = make_batch(Shape(4, 2, 64, 32), [70, 33], torch.bfloat16)
    batch.q[:2, : 4 * 64] *= size
    for row in range(2):
        batch.keys[row] *= 1.0 if size < 1.0 else 3.0 / size
    check(batch, name)


@both_formats
@pytest.mark.parametrize("size", [2.0**-14, 2.0**-7, 2.0**20])
def test_values_of_any_size(size: float, name: str, check: Check) -> None:
    """The scales of values cover float16's range, or lie far apart within a row."""
    batch = make_batch(Shape(4, 2, 64, 32), [70, 33], torch.bfloat16)
    for row in range(2):
        batch.values[row] *= size
        batch.values[row][::3] *= 2.0**-7
    check(batch, name, size=size)


@both_formats
def test_values_that_are_zero(name: str, check: Check) -> None:
    batch = make_batch(Shape(4, 2, 64, 32), [70, 33], torch.bfloat16)
    batch.values[0][:] = 0
    batch.values[1][::2] = 0
    check(batch, name)


@both_formats
@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
def test_bounded_scores_and_sinks(
    softcap: float | None, sinks: float | None, name: str, check: Check
) -> None:
    batch = make_batch(Shape(6, 2, 64, 32), [1, 60, 170], DTYPE)
    check(with_scores(batch, softcap, sinks), name, window=50)


@both_formats
def test_scores_far_apart(name: str, check: Check) -> None:
    """Put all the weight on one key, whose part may be any; others underflow."""
    batch = make_batch(Shape(1, 1, 64, 32), [256] * 4, DTYPE)
    for row, position in enumerate([0, 70, 130, 200]):
        batch.keys[row][position, 0] = 30.0
    check(batch, name)


@both_formats
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_arrays_without_room_to_spare(num_rows: int, name: str, check: Check) -> None:
    lengths = [40, 9, 16, 33, 1, 2, 170, 3][:num_rows]
    check(without_padding(make_batch(Shape(4, 2, 64, 32), lengths, DTYPE)), name)


@both_formats
def test_beside_prompt_rows(name: str, check: Check) -> None:
    check(make_batch(Shape(4, 2, 64, 32), [40, 3, 20, 33, 8], DTYPE, [1, 1, 1, 3, 3], 3), name)
