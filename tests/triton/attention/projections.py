"""A check of decode attention that takes a step's projections as they come."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sidestep.kernels.attention.decode_attention_triton import DecodeScratch, decode_attention
from sidestep.kernels.attention.decode_few import FewScratch
from sidestep.kernels.attention.few_plan_triton import COLUMNS
from sidestep.kernels.attention.qkv_rope_triton import Rope
from tests.triton.attention.rotary import EPS, normed, rotary_tables, turned
from tests.triton.batches import Batch, assert_rows_untouched
from tests.triton.support import (
    DEVICE,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    same,
    unchanged,
)


def planned(batch: Batch, scratch: FewScratch, tile_ends: Tensor, window: int) -> Tensor:
    """Return the plan of few rows."""
    work = guarded(torch.zeros(scratch.parts + len(tile_ends), COLUMNS, dtype=torch.int32))
    scratch.plan(
        work,
        tile_ends,
        batch.seq_lens,
        batch.slots,
        batch.block_tables,
        batch.shape.page,
        window,
    )
    if work.is_cuda:
        # The kernel reads the list before it waits: another one must lie between, or none run.
        torch.cuda.synchronize()
    return work


def check_projections(
    batch: Batch, scratch: DecodeScratch, window: int = 0, *, with_norms: bool = False
) -> None:
    """Check attention of the projections before they are in the cache.

    The keys and values of the rows' last tokens are not in the cache yet.
    """
    shape, dtype, rows = batch.shape, batch.q.dtype, batch.num_decode
    assert rows == batch.decode_tokens
    values = Values(rows + shape.dim)
    q_weight, k_weight = (guarded(values.normal(shape.dim, dtype=dtype)) for _ in range(2))
    cos, sin = rotary_tables(shape.dim, max(batch.lengths))
    at = torch.tensor(batch.lengths[:rows], device=DEVICE) - 1
    heads = batch.q[:rows].view(rows, -1, shape.dim)
    heads[:, shape.heads :] = values.normal(rows, 2 * shape.kv_heads, shape.dim, dtype=dtype)
    query, key, value = heads.double().split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    query, key = (
        turned(normed(x, weight) if with_norms else x, cos[at], sin[at]).to(dtype)
        for x, weight in ((query, q_weight), (key, k_weight))
    )
    targets = [
        (int(batch.block_tables[batch.slots[row], n // shape.page]), n % shape.page)
        for row, n in enumerate(at.tolist())
    ]
    for row, (block, offset) in enumerate(targets):
        batch.cache[block, :, offset] = float("nan")
        batch.keys[row][-1], batch.values[row][-1] = key[row], value[row]
    before, out = batch.cache.clone(), batch.new_out()
    with (
        unchanged(
            **{name: x for name, x in batch.inputs.items() if name != "cache"},
            cos=cos,
            sin=sin,
            q_weight=q_weight,
            k_weight=k_weight,
        ),
        PoisonedAllocations(),
    ):
        tile_ends, _ = batch.plan(scratch.config.tile, 16, window)
        few = scratch.few
        decode_attention(
            batch.q,
            batch.cache,
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
            rope=Rope(cos, sin, (q_weight, k_weight) if with_norms else None, EPS),
            few_work=planned(batch, few, tile_ends, window) if few is not None else None,
        )
    assert not scratch.counters.any(), "a counter is left behind"
    assert_rows_untouched(batch, out, slice(rows, None), "tokens of prompt rows")
    turned_batch = replace(batch, q=batch.q.clone())
    turned_batch.q[:rows, : shape.heads * shape.dim] = query.flatten(1)
    for row, (block, offset) in enumerate(targets):
        assert_close(out[row : row + 1], turned_batch.expected(row, window), ulps=6)
        written = batch.cache[block, :, offset]
        assert_close(written[: shape.kv_heads], key[row].double(), ulps=6)
        assert torch.equal(written[shape.kv_heads :], value[row].to(dtype)), (
            "values are copied as they are"
        )
        before[block, :, offset] = written
    assert same(batch.cache, before), "wrote to other slots of the cache"
