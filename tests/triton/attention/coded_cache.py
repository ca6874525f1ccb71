"""Caches of codes for the tests of attention. Memory that no row may read is poisoned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.ops.kv_quantization import CODE_TYPES, CodeFormat, dequantize, quantize
from tests.triton.batches import Batch
from tests.triton.support import INTERPRETED, poisoned

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
