"""A check of decode attention that takes a step's projections as they come."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_few import FewScratch
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.few_plan_triton import COLUMNS
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


class Projected(NamedTuple):
    """The projections of a batch's last tokens, and what is made of them.

    q_weight, k_weight: of the norms; cos, sin: tables; query, key, value [rows, heads, D], normed
    and turned in the batch's type; targets: block and place of each row's token in the cache.
    """

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    targets: list[tuple[int, int]]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that no kernel may write to."""
        return {name: getattr(self, name) for name in ("q_weight", "k_weight", "cos", "sin")}

    def rope(self, *, with_norms: bool) -> Rope:
        """Return what the kernel does with them."""
        norms = (self.q_weight, self.k_weight) if with_norms else None
        return Rope(self.cos, self.sin, norms, EPS)


def projected(batch: Batch, *, with_norms: bool) -> Projected:
    """Put new keys and values beside the queries of the batch's decode rows, and turn them."""
    shape, dtype, rows = batch.shape, batch.q.dtype, batch.num_decode
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
    return Projected(q_weight, k_weight, cos, sin, query, key, value.to(dtype), targets)


def check_projections(
    batch: Batch, scratch: DecodeScratch, window: int = 0, *, with_norms: bool = False
) -> None:
    """Check attention of the projections before they are in the cache.

    The keys and values of the rows' last tokens are not in the cache yet.
    """
    shape, rows = batch.shape, batch.num_decode
    assert rows == batch.decode_tokens
    new = projected(batch, with_norms=with_norms)
    query, key, value, targets = new.query, new.key, new.value, new.targets
    for row, (block, offset) in enumerate(targets):
        batch.cache[block, :, offset] = float("nan")
        batch.keys[row][-1], batch.values[row][-1] = key[row], value[row]
    before, out = batch.cache.clone(), batch.new_out()
    with (
        unchanged(
            **{name: x for name, x in batch.inputs.items() if name != "cache"},
            **new.inputs,
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
            rope=new.rope(with_norms=with_norms),
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
        assert torch.equal(written[shape.kv_heads :], value[row]), "values are copied as they are"
        before[block, :, offset] = written
    assert same(batch.cache, before), "wrote to other slots of the cache"
