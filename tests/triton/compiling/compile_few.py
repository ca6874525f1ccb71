"""Compilation of decode attention of few rows (see compile_kernels.py)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sidestep.kernels.attention import decode_attention_triton, decode_config
from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from tests.triton.compiling.meta_tensors import bf16, f32, i32

_SLOTS = 512


class Heads(Protocol):
    """Sizes of a model's attention."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def dim(self) -> int: ...


def launch_few(
    model: Heads,
    q: Tensor,
    cache: Tensor | CodedCache,
    rope: Rope,
    window: int,
    kv_scales: Tensor | None = None,
) -> None:
    """Launch attention of few rows and its plan, for heads that have them."""
    # Beside plain products, one row of a wide model has a configuration of its own.
    for coded in (True,) if isinstance(cache, CodedCache) else (False, True):
        _launch(model, q, cache, rope, window, kv_scales, coded_products=coded)


def _launch(
    model: Heads,
    q: Tensor,
    cache: Tensor | CodedCache,
    rope: Rope,
    window: int,
    kv_scales: Tensor | None,
    *,
    coded_products: bool,
) -> None:
    page, coded = cache.shape[2], isinstance(cache, CodedCache)
    config = decode_config.config_of(
        model.dim,
        2,
        model.heads,
        model.kv_heads,
        1,
        bytes_of_codes=coded,
        coded_products=coded_products,
    )
    scratch = DecodeScratch(model.heads, model.kv_heads, model.dim, 16, q.device, config)
    if scratch.few is None or not scratch.few.takes(16, page):
        return
    work, tables, rows = scratch.few.new_work(16), i32(_SLOTS, 600), i32(16)
    scratch.few.plan(work, rows, rows, rows, tables, page, window)
    for softcap, sinks, count in ((None, None, 1), (50.0, f32(model.heads), 16)):
        decode_attention_triton.decode_attention(
            q,
            cache,
            tables,
            rows,
            rows,
            rows,
            bf16(count, model.heads * model.dim),
            scratch,
            num_heads=model.heads,
            window=window,
            scale=0.1,
            softcap=softcap,
            sinks=sinks,
            rope=rope,
            few_work=work,
            kv_scales=kv_scales,
        )
