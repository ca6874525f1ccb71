"""Decode attention of few rows over codes of 8 bits, which takes a step's projections as they come.

The references are those of tests/triton/attention/test_kv_codes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention import decode_attention_triton, decode_few
from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig, FewConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.few_sums_gluon import ABSENT
from sidestep.kernels.launch import has_pdl
from tests.triton.attention.coded_cache import coded, stored
from tests.triton.attention.projections import planned, projected
from tests.triton.batches import SCORES, Batch, Shape, make_batch, with_scores, without_padding
from tests.triton.support import (
    DEVICE,
    DTYPE,
    PoisonedAllocations,
    Values,
    assert_close,
    unchanged,
)

pytestmark = pytest.mark.skipif(not has_pdl(DEVICE), reason="needs a GPU like Hopper or later")

Check = Callable[..., None]
both_formats = pytest.mark.parametrize("name", ["fp8", "int8"])


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check launches of `parts` programs a KV head, and that they clear their scratch.

    No other kernel may run. given: whether heads have scales of their own; every other one has.
    """

    def run(
        batch: Batch,
        name: str,
        parts: int,
        window: int = 0,
        *,
        stages: int = 2,
        min_tiles: int = 1,
        with_norms: bool = False,
        given: bool = False,
        launches: int = 1,
    ) -> None:
        shape = batch.shape
        for module in (decode_attention_triton, decode_few):
            monkeypatch.setattr(module, "num_processors", lambda device: parts * shape.kv_heads)
        for kernel in ("_decode", "decode_codes"):
            monkeypatch.setattr(decode_attention_triton, kernel, None)
        few = FewConfig(stages=stages, programs_per_processor=1, min_tiles=min_tiles)
        config = DecodeConfig(tile=16, programs_per_processor=1, few=few)
        with PoisonedAllocations():
            scratch = batch.scratch(config)
        scales = None
        if given:
            scales = torch.zeros(2 * shape.kv_heads, dtype=torch.float16, device=DEVICE)
            scales[::2] = 0.03
        for _ in range(launches):
            check_codes(batch, name, scratch, window, with_norms=with_norms, scales=scales)
            assert scratch.few is not None
            for left in (scratch.few.partial, scratch.few.stats):
                assert bool((left == ABSENT.value).all()), "a part is left behind"

    return run


def check_codes(
    batch: Batch,
    name: str,
    scratch: DecodeScratch,
    window: int,
    *,
    with_norms: bool,
    scales: Tensor | None,
) -> None:
    """Check attention of projections whose keys and values are not in the cache yet."""
    batch, cache = coded(batch, name)
    shape, rows = batch.shape, batch.num_decode
    new = projected(batch, with_norms=with_norms)
    query, key, value, targets = new.query, new.key, new.value, new.targets
    for block, offset in targets:
        cache.codes.view(torch.uint8)[block, :, offset] = 0x7F
        cache.numbers[block, :, offset] = float("nan")
    codes, numbers = cache.codes.clone(), cache.numbers.clone()
    out, tile_ends = batch.new_out(), batch.plan(scratch.config.tile, 16, window)[0]
    assert scratch.few is not None
    work = planned(batch, scratch.few, tile_ends, window)
    with unchanged(**batch.inputs, **new.inputs):
        decode_attention(
            batch.q,
            cache,
            batch.block_tables,
            batch.slots,
            batch.seq_lens,
            tile_ends,
            out,
            scratch,
            num_heads=shape.heads,
            window=window,
            scale=shape.dim**-0.5,
            softcap=batch.softcap,
            sinks=batch.sinks,
            rope=new.rope(with_norms=with_norms),
            few_work=work,
            kv_scales=scales,
        )
    turned_batch = replace(batch, q=batch.q.clone())
    turned_batch.q[:rows, : shape.heads * shape.dim] = query.flatten(1)
    for row, (block, offset) in enumerate(targets):
        read = stored(cache, block, offset)
        check_stored(cache, (block, offset), torch.cat([key[row], value[row]]), scales)
        batch.keys[row][-1], batch.values[row][-1] = read.split(shape.kv_heads)
        assert_close(out[row : row + 1], turned_batch.expected(row, window), ulps=8)
        codes[block, :, offset] = cache.codes[block, :, offset]
        numbers[block, :, offset] = cache.numbers[block, :, offset]
    assert torch.equal(codes.view(torch.uint8), cache.codes.view(torch.uint8))
    assert torch.equal(numbers.view(torch.int16), cache.numbers.view(torch.int16))


def check_stored(
    cache: CodedCache, place: tuple[int, int], kv: Tensor, scales: Tensor | None
) -> None:
    """Check the codes of a token kv [2 KVH, D], up to the rounding of its rotated keys."""
    block, offset = place
    read, kv, dtype = stored(cache, block, offset), kv.float(), kv.dtype
    scale = cache.numbers[block, :, offset].float()
    most = 127 if cache.format == "int8" else 448
    wanted = kv.abs().amax(1) / most
    if scales is not None:
        wanted = torch.where(scales > 0, scales.float(), wanted)
    assert torch.allclose(scale, wanted, rtol=0.01), "the scales"
    bounded = kv.clamp(-most * scale[:, None], most * scale[:, None])
    step = scale[:, None] if cache.format == "int8" else bounded.abs() / 8 + scale[:, None] / 512
    noise = torch.finfo(dtype).eps * kv.abs().amax(1, keepdim=True)
    assert bool(((read - bounded).abs() <= 0.51 * step + noise).all()), "the codes"


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "parts", "window"),
    [
        (Shape(4, 2, 64, 32), 16, 0),
        (Shape(6, 2, 128, 32), 16, 45),
        (Shape(16, 1, 128, 128), 30, 0),
        (Shape(5, 5, 64, 64), 17, 100),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [False, True])
def test_random_batches(
    shape: Shape,
    parts: int,
    window: int,
    dtype: torch.dtype,
    name: str,
    given: bool,
    check: Check,
) -> None:
    lengths = Values(parts).integers(1, 500, 4)
    batch = make_batch(shape, lengths, dtype, seed=parts)
    check(batch, name, parts, window, with_norms=not given, given=given)


@both_formats
@pytest.mark.parametrize("window", [0, 1, 32, 33])
def test_lengths_around_the_borders_of_tiles(window: int, name: str, check: Check) -> None:
    """Cover lengths of one token, of whole tiles and blocks, and of one token more."""
    batch = make_batch(Shape(6, 2, 64, 64), [1, 32, 33, 64, 65, 129], DTYPE)
    for parts in (32, 60):
        check(batch, name, parts, window)


@both_formats
@pytest.mark.parametrize("group", [1, 3, 8, 12])
def test_groups_of_query_heads(group: int, name: str, check: Check) -> None:
    check(make_batch(Shape(group, 1, 128, 64), [1, 300, 90], DTYPE, seed=group), name, 16)


@both_formats
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("length", [64, 65, 1900])
def test_rows_of_any_number_of_parts(length: int, stages: int, name: str, check: Check) -> None:
    """Cover rows of one part, of parts of several tiles, and of more parts than are taken at once.

    A second launch takes the scratch as the first one left it.
    """
    for lengths in ([length], [length, 1, 5]):
        batch = make_batch(Shape(2, 1, 128, 64), lengths, DTYPE)
        check(batch, name, 40, stages=stages, launches=2)


@both_formats
def test_programs_may_be_given_a_least_number_of_tiles(name: str, check: Check) -> None:
    check(make_batch(Shape(4, 2, 64, 32), [20, 470, 3], DTYPE), name, 16, min_tiles=4)


@both_formats
@pytest.mark.parametrize(("softcap", "sinks"), SCORES)
def test_bounded_scores_and_sinks(
    softcap: float | None, sinks: float | None, name: str, check: Check
) -> None:
    batch = make_batch(Shape(6, 2, 64, 32), [1, 60, 170], DTYPE)
    check(with_scores(batch, softcap, sinks), name, 16, window=50)


@both_formats
def test_values_that_are_zero(name: str, check: Check) -> None:
    batch = make_batch(Shape(4, 2, 64, 32), [70, 33], torch.bfloat16)
    batch.values[0][:] = 0
    batch.values[1][::2] = 0
    check(batch, name, 16)


@both_formats
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_arrays_without_room_to_spare(num_rows: int, name: str, check: Check) -> None:
    lengths = [40, 9, 16, 33, 1, 2, 170, 3][:num_rows]
    check(without_padding(make_batch(Shape(4, 2, 64, 32), lengths, DTYPE)), name, 16)
