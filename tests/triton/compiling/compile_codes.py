"""Launches of the kernels of attention over codes, for compile_kernels.py."""

from __future__ import annotations

import torch

from sidestep.kernels.attention import (
    decode_attention_triton,
    decode_config,
    prefill_attention_triton,
    qkv_rope_triton,
)
from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_codes import takes_codes
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.gpu import gpu_of
from tests.triton.compiling.compile_few import Heads, launch_few
from tests.triton.compiling.meta_tensors import TOKENS, bf16, f32, i32, u8

_BLOCKS, _SLOTS, _ROWS, _QUERIES = 20_000, 1024, 512, 5


def _cache(heads: int, page: int, dim: int, name: str) -> CodedCache:
    width, count = (dim // 2, 2) if name == "int4" else (dim, 1)
    size, numbers = heads * page * width, count * heads * page
    memory = u8(_BLOCKS, size + 2 * numbers)
    codes = memory[:, :size].unflatten(1, (heads, page, width))
    return CodedCache(
        codes.view(torch.int8) if name == "int8" else codes,
        memory[:, size:]
        .view(torch.float16)
        .unflatten(1, (2, heads, page) if count == 2 else (heads, page)),
        name,
    )


def launch_codes(model: Heads, page: int, window: int) -> None:
    """Launch the writing of codes, decodes with and without drafts, and prompts."""
    gpu = gpu_of(torch.device("meta"))
    assert gpu is not None
    for name in ("int8", "fp8" if gpu.capability >= 89 else "fp8_bits", "int4"):
        _launch_format(model, _cache(2 * model.kv_heads, page, model.dim, name), window)


def _launch_format(model: Heads, cache: CodedCache, window: int) -> None:
    q = bf16(TOKENS, (model.heads + 2 * model.kv_heads) * model.dim)
    table, ids = f32(40_000, model.dim // 2), i32(TOKENS)
    # The choice "fp8" gives scales, with or without a checkpoint's own.
    scales = bf16(2 * model.kv_heads).half() if cache.format.startswith("fp8") else None
    rope = Rope(table, table, None, 1e-6)
    qkv_rope_triton.qkv_rope(q, ids, ids, rope, cache, model.heads, scales)
    tiles = 32, 2, 2
    if takes_codes(cache, q.dtype, model.heads, *tiles):
        launch_few(model, q, cache, rope, window, scales)
    out, tables = bf16(TOKENS, model.heads * model.dim), i32(_SLOTS, 600)
    rows, starts = i32(_ROWS), i32(_ROWS + 1)
    for queries in (1, _QUERIES):
        config = decode_config.config_of(
            model.dim,
            2,
            model.heads,
            model.kv_heads,
            queries,
            bytes_of_codes=cache.format != "int4",
        )
        scratch = DecodeScratch(
            model.heads, model.kv_heads, model.dim, _ROWS, q.device, config, queries
        )
        decode_attention_triton.decode_attention(
            q,
            cache,
            tables,
            rows,
            rows,
            rows,
            out,
            scratch,
            num_heads=model.heads,
            window=window,
            scale=0.1,
            queries=queries,
            valid_lens=rows if queries > 1 else None,
        )
    prefill_attention_triton.prefill_attention(
        q,
        cache,
        tables,
        rows,
        rows,
        starts,
        rows,
        out,
        prefill_attention_triton.prefill_config(model.dim, 2),
        num_heads=model.heads,
        max_tokens=TOKENS,
        max_rows=_ROWS,
        window=window,
        scale=0.1,
    )
