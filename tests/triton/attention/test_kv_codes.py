"""Attention over codes against float64 of the decoded cache, and the codes that are written.

Memory that no row may read is poisoned, numbers as NaN.
"""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.prefill_attention_triton import PrefillConfig, prefill_attention
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.ops.kv_quantization import dequantize, quantize
from tests.triton.attention.coded_cache import (
    FORMATS,
    NATIVE,
    coded,
    empty_codes,
    reference_format,
    stored,
)
from tests.triton.attention.rotary import EPS, rotary_tables, turned
from tests.triton.batches import Batch, Shape, assert_rows_untouched, make_batch, with_scores
from tests.triton.support import (
    DEVICE,
    DTYPE,
    Values,
    assert_close,
    int32,
    unchanged,
)


def check(batch: Batch, name: str, window: int = 0, queries: int = 1) -> None:
    """Check the attention of decode rows, then that of the others."""
    batch, cache = coded(batch, name)
    shape, out = batch.shape, batch.new_out()
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_processor=1, min_tiles=1)
    tiles = PrefillConfig(rows=16, keys=16, num_warps=4, num_stages=2)
    scratch = batch.scratch(config, queries)
    common = batch.block_tables, batch.slots, batch.seq_lens
    more = {
        "num_heads": shape.heads,
        "window": window,
        "scale": shape.dim**-0.5,
        "softcap": batch.softcap,
        "sinks": batch.sinks,
    }
    ends = batch.plan(16, tiles.tokens(shape.group), window, queries)
    with unchanged(**batch.inputs, codes=cache.codes, numbers=cache.numbers):
        if batch.num_decode:
            decode_attention(
                batch.q, cache, *common, ends[0], out, scratch, queries=queries, **more
            )
        if batch.num_decode < len(batch.lengths):
            prefill_attention(
                batch.q,
                cache,
                *common,
                batch.query_starts,
                ends[1],
                out,
                tiles,
                max_tokens=sum(batch.counts) - batch.decode_tokens,
                max_rows=len(batch.lengths) - batch.num_decode,
                **more,
            )
    assert_rows_untouched(batch, out, slice(sum(batch.counts), None), "padding")
    for row in range(len(batch.lengths)):
        assert_close(out[batch.tokens(row)], batch.expected(row, window), ulps=8, float32_ulps=64)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("name", FORMATS)
def test_steps_of_decodes_and_prompts(name: str, window: int) -> None:
    shape = Shape(4, 2, 32, 32)
    check(make_batch(shape, [1, 33, 70, 40, 5], DTYPE, [1, 1, 1, 17, 5], 3), name, window)


@pytest.mark.parametrize("name", FORMATS)
def test_float16_and_tiles_of_several_blocks(name: str) -> None:
    shape = Shape(3, 1, 64, 8) if name != "fp8" else Shape(3, 1, 64, 16)
    check(make_batch(shape, [9, 41, 30], torch.float16, [1, 1, 12], 2), name)


@pytest.mark.parametrize("name", FORMATS[:2])
def test_heads_of_a_size_that_is_no_power_of_two(name: str) -> None:
    check(make_batch(Shape(4, 2, 40, 16), [18, 50], DTYPE, [1, 20], 1), name)


@pytest.mark.parametrize(("softcap", "sinks"), [(0.7, None), (None, 1.0)])
@pytest.mark.parametrize("name", FORMATS)
def test_scores_that_are_bounded_and_sinks(
    name: str, softcap: float | None, sinks: float | None
) -> None:
    batch = make_batch(Shape(4, 2, 16, 16), [21, 34], DTYPE, [1, 9], 1)
    check(with_scores(batch, softcap, sinks), name)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_several_queries(name: str, window: int) -> None:
    batch = make_batch(Shape(4, 2, 16, 16), [21, 4, 50], DTYPE, [4, 4, 4], 3)
    check(batch, name, window, queries=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "with_norms"), [(16, False), (64, True), (24, True)])
@pytest.mark.parametrize("name", FORMATS)
def test_written_codes_are_near_the_keys_and_values(
    name: str, dim: int, with_norms: bool, dtype: torch.dtype
) -> None:
    """Compare with the codes of the reference, which differ by one where rounding does."""
    if name == "int4" and dim == 24:
        return
    heads, kv_heads, page, tokens = 4, 2, 16, 9
    values = Values(dim)
    qkv = values.normal(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv[3, heads:] = 0
    weights = torch.rand(2, dim).to(DEVICE, dtype) + 0.5
    cos, sin = rotary_tables(dim, 40)
    positions = list(range(20, 20 + tokens))
    cache = empty_codes(4, 2 * kv_heads, page, dim, name)
    slots = [page * 2 + 5, 3, -1, 60, 17, 40, 63, 0, 16]
    before = cache.codes.clone()
    given = qkv.clone().flatten(1)
    qkv_rope(
        given,
        int32(positions),
        int32(slots),
        Rope(cos, sin, (weights[0], weights[1]) if with_norms else None, EPS),
        cache,
        heads,
    )
    key = qkv[:, heads : heads + kv_heads].double()
    if with_norms:
        key = key / (key.square().mean(-1, keepdim=True) + EPS).sqrt() * weights[1].double()
    at = torch.tensor(positions, device=DEVICE)
    both = torch.cat([turned(key, cos[at], sin[at]), qkv[:, heads + kv_heads :].double()], 1)
    name_of = reference_format(name)
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        read = stored(cache, slot // page, slot % page).double()
        expected = dequantize(*quantize(both[token].to(dtype), name_of), name_of).double()
        span = both[token].abs().amax(-1, keepdim=True)
        step = {"int8": 1 / 127, "fp8": 1 / 14, "int4": 2 / 15}[name_of]
        assert ((read - expected).abs() <= span * step * 1.01).all()
        assert (read - expected).abs().mean() <= 0.02 * span.max() * step + 1e-3 * span.max()
        assert (read - both[token]).abs().max() <= span.max() * step * 1.01
        before[slot // page, :, slot % page] = cache.codes[slot // page, :, slot % page]
    assert torch.equal(before, cache.codes), "wrote to other slots of the cache"


@pytest.mark.parametrize("name", ["fp8_bits", *(["fp8"] if NATIVE else [])])
def test_every_code_of_e4m3_is_read_as_torch_reads_it(name: str) -> None:
    """Attend to one key at a time: the result is its value."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = [i for i in range(256) if bool(codes[i].float().isfinite())]
    shape, page = Shape(1, 1, 16, 16), 16
    rows = -(-len(finite) // 16)
    batch = make_batch(shape, [1] * rows, DTYPE)
    cache = empty_codes(len(batch.cache), 2, page, 16, name)
    chosen = [(finite * 2)[16 * row : 16 * row + 16] for row in range(rows)]
    for row, own in enumerate(chosen):
        block = int(batch.block_tables[batch.slots[row], 0])
        cache.codes[block, 0, 0] = 0
        cache.codes[block, 1, 0] = torch.tensor(own, dtype=torch.uint8, device=DEVICE)
        cache.numbers[block, :, 0] = 1.0
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_processor=1, min_tiles=1)
    scratch = DecodeScratch(1, 1, 16, len(batch.seq_lens), DEVICE, config)
    out, (ends, _) = batch.new_out(), batch.plan(16, 16, 0)
    decode_attention(
        batch.q,
        cache,
        batch.block_tables,
        batch.slots,
        batch.seq_lens,
        ends,
        out,
        scratch,
        num_heads=1,
        window=0,
        scale=1.0,
    )
    expected = torch.stack([codes[torch.tensor(own)].float() for own in chosen])
    assert torch.equal(out[:rows].float().cpu(), expected)


@pytest.mark.parametrize("name", ["fp8_bits", *(["fp8"] if NATIVE else [])])
def test_given_scales_replace_those_of_tokens(name: str) -> None:
    """Two heads have scales, by which some numbers are too large; the others have none."""
    heads, kv_heads, page, dim, tokens = 4, 2, 16, 16, 5
    qkv = Values(3).normal(tokens, heads + 2 * kv_heads, dim, dtype=DTYPE)
    cos, sin = torch.ones(8, dim // 2, device=DEVICE), torch.zeros(8, dim // 2, device=DEVICE)
    given = torch.tensor([2.0**-8, 0, 0, 2.0**-9], dtype=torch.float16, device=DEVICE)
    cache = empty_codes(2, 2 * kv_heads, page, dim, name)
    slots = [3, 17, -1, 20, 0]
    source = qkv.clone().flatten(1)
    qkv_rope(
        source, int32(range(tokens)), int32(slots), Rope(cos, sin, None, EPS), cache, heads, given
    )
    codes, numbers = quantize(qkv[:, heads:], "fp8", given)
    expected = dequantize(codes, numbers, "fp8")
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(stored(cache, slot // page, slot % page), expected[token])
            assert torch.equal(cache.numbers[slot // page, :, slot % page], numbers[token, :, 0])
    assert bool((numbers[:, [0, 3], 0] == given[[0, 3]]).all())
    assert bool((qkv[:, heads].abs() > 448 * given[0]).any())
