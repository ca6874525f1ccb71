"""Attention over codes against float64 of the decoded cache, and the codes that are written.

Memory that no row may read is poisoned, numbers as NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention.decode_attention_triton import DecodeScratch, decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.kv_codes_triton import CodedCache
from sidestep.kernels.attention.prefill_attention_triton import PrefillConfig, prefill_attention
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.ops.kv_quantization import CODE_TYPES, CodeFormat, dequantize, quantize
from tests.triton.attention.rotary import EPS, rotary_tables, turned
from tests.triton.batches import Batch, Shape, assert_rows_untouched, make_batch, with_scores
from tests.triton.support import (
    DEVICE,
    DTYPE,
    INTERPRETED,
    Values,
    assert_close,
    int32,
    poisoned,
    unchanged,
)

NATIVE = INTERPRETED or torch.cuda.get_device_capability() >= (8, 9)
FORMATS = ["int8", "fp8_bits", *(["fp8"] if NATIVE else []), "int4"]
BYTES = 448
"""Bytes between blocks, beside their own: a block is a part of a larger one."""


def reference_format(name: str) -> CodeFormat:
    return "int8" if name == "int8" else "int4" if name == "int4" else "fp8"


def empty_codes(blocks: int, heads: int, page: int, dim: int, name: str) -> CodedCache:
    """Return blocks of poison whose numbers are NaN."""
    width, count = (dim // 2, 2) if name == "int4" else (dim, 1)
    size = heads * page * width
    memory = poisoned(blocks, size + 2 * count * heads * page + BYTES, dtype=torch.uint8)
    numbers = memory[:, size : size + 2 * count * heads * page].view(torch.float16)
    numbers.fill_(float("nan"))
    codes = memory[:, :size].unflatten(1, (heads, page, width))
    return CodedCache(
        codes.view(torch.int8) if name == "int8" else codes,
        numbers.unflatten(1, (2, heads, page) if count == 2 else (heads, page)),
        name,
    )


def put(cache: CodedCache, block: int, offset: int, kv: Tensor) -> Tensor:
    """Store a token kv [2 KVH, D], and return what is read then: float32 [2 KVH, D]."""
    name = reference_format(cache.format)
    codes, numbers = quantize(kv, name)
    if name == "int4":
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        half = both.shape[-1] // 2
        cache.codes[block, :, offset] = both[:, :half] | (both[:, half:] << 4)
        cache.numbers[block, :, :, offset] = numbers.T
    else:
        cache.codes[block, :, offset] = codes.view(cache.codes.dtype)
        cache.numbers[block, :, offset] = numbers[:, 0]
    return dequantize(codes, numbers, name)


def stored(cache: CodedCache, block: int, offset: int) -> Tensor:
    """Return what is read of a token: float32 [2 KVH, D]."""
    name, codes = reference_format(cache.format), cache.codes[block, :, offset]
    if name == "int4":
        both = torch.cat([codes & 15, codes >> 4], -1)
        codes = both[:, ::2] | (both[:, 1::2] << 4)
        return dequantize(codes, cache.numbers[block, :, :, offset].T, name)
    return dequantize(codes.view(CODE_TYPES[name]), cache.numbers[block, :, offset, None], name)


def coded(batch: Batch, name: str) -> tuple[Batch, CodedCache]:
    """Return the batch with the keys and values that its codes stand for, and the codes."""
    shape = batch.shape
    cache = empty_codes(len(batch.cache), 2 * shape.kv_heads, shape.page, shape.dim, name)
    keys, values = [], []
    for row, length in enumerate(batch.lengths):
        both = torch.cat([batch.keys[row], batch.values[row]], 1)
        table = batch.block_tables[batch.slots[row]]
        read = [
            put(cache, int(table[n // shape.page]), n % shape.page, both[n]) for n in range(length)
        ]
        key, value = torch.stack(read).split(shape.kv_heads, 1)
        keys.append(key)
        values.append(value)
    return replace(batch, keys=keys, values=values), cache


def check(batch: Batch, name: str, window: int = 0, queries: int = 1) -> None:
    """Check the attention of decode rows, then that of the others."""
    batch, cache = coded(batch, name)
    shape, out = batch.shape, batch.new_out()
    config = DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_processor=1, min_tiles=1)
    tiles = PrefillConfig(rows=16, keys=16, num_warps=4, num_stages=2)
    scratch = DecodeScratch(
        shape.heads, shape.kv_heads, shape.dim, len(batch.seq_lens), DEVICE, config, queries
    )
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
        cos,
        sin,
        (weights[0], weights[1]) if with_norms else None,
        EPS,
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
