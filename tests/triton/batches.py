"""Ragged batches for the attention kernels, and their expected attention in float64.

A batch has queries, a paged cache and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sidestep.kernels.attention.attention_plan_triton import plan_attention
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from tests.triton.support import (
    Values,
    assert_margins_untouched,
    assert_untouched,
    guarded,
    int32,
    poisoned,
)

SPARE_ROWS, SPARE_TOKENS = 3, 5
"""Rows and tokens for which the arrays have room beyond a step's own."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model and its cache."""

    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    page: int = 16

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass
class Batch:
    """One step: decode rows, all of as many tokens, then rows that compute chunks of prompts."""

    shape: Shape
    lengths: list[int]
    """Number of tokens of each row, including those of this step."""
    counts: list[int]
    """Number of tokens of each row in this step, the last ones of its length."""
    num_decode: int
    q: Tensor
    cache: Tensor
    block_tables: Tensor
    slots: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    header: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    """Contents of the cache by row, [length, KVH, D]."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """float32 [H]"""

    def tokens(self, row: int) -> slice:
        start = sum(self.counts[:row])
        return slice(start, start + self.counts[row])

    @property
    def decode_tokens(self) -> int:
        return sum(self.counts[: self.num_decode])

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors that no kernel of attention may write to."""
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return sinks | {
            "q": self.q,
            "cache": self.cache,
            "block_tables": self.block_tables,
            "slots": self.slots,
            "seq_lens": self.seq_lens,
            "query_starts": self.query_starts,
            "header": self.header,
        }

    def new_out(self) -> Tensor:
        return poisoned(self.q.shape[0], self.shape.heads * self.shape.dim, dtype=self.q.dtype)

    def expected(self, row: int, window: int) -> Tensor:
        """Return the attention in float64, [count, H * D].

        Each token attends to the last `window` tokens up to itself; 0 means all.
        """
        length, count, dim = self.lengths[row], self.counts[row], self.shape.dim
        query = self.q[self.tokens(row), : self.shape.heads * dim].double().view(count, -1, dim)
        key, value = (
            x[row].double().repeat_interleave(self.shape.group, 1) for x in (self.keys, self.values)
        )
        distance = (torch.arange(length - count, length)[:, None] - torch.arange(length)[None]).to(
            query.device
        )
        hidden = (distance < 0) | (distance >= (window or length))
        scores = torch.einsum("nhd,lhd->hnl", query, key) * dim**-0.5
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hnl,lhd->nhd", weights, value).reshape(count, -1)

    def scratch(self, config: DecodeConfig, queries: int = 1) -> DecodeScratch:
        """Return scratch memory for decode attention of these rows."""
        heads = self.shape.heads, self.shape.kv_heads, self.shape.dim
        return DecodeScratch(*heads, len(self.seq_lens), self.q.device, config, queries)

    def plan(self, tile: int, tokens: int, window: int, queries: int = 1) -> tuple[Tensor, Tensor]:
        """Return the two lists of tile ends, and check that the rest is not written."""
        padded = 1 << (len(self.seq_lens) - 1).bit_length()
        ends = poisoned(padded, dtype=torch.int32), poisoned(padded, dtype=torch.int32)
        plan_attention(
            self.seq_lens,
            self.query_starts,
            self.header,
            *ends,
            tile=tile,
            tokens=tokens,
            window=window,
            queries=queries,
        )
        assert_margins_untouched(*ends)
        return ends


def make_batch(
    shape: Shape,
    lengths: Sequence[int],
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
    num_decode: int | None = None,
    seed: int = 0,
) -> Batch:
    """Return a batch of random values; counts are 1 by default.

    Memory that no row may read is NaN: the cache behind a row's last token, blocks without an
    owner, padding tokens, and the columns of q that held keys and values.
    """
    values, dim, page = Values(seed), shape.dim, shape.page
    counts = list(counts) if counts is not None else [1] * len(lengths)
    used = [-(-length // page) for length in lengths]
    # No row owns the last block: tables point to it wherever they have no entry.
    cache = poisoned(sum(used) + 3, 2 * shape.kv_heads, page, dim, dtype=dtype)
    nobodys = len(cache) - 1
    blocks = values.different(sum(used), below=nobodys)
    slots = values.different(len(lengths) + SPARE_ROWS, below=len(lengths) + SPARE_ROWS + 4)
    # Rows of the tables lie further apart than they are long.
    table = torch.full((len(slots) + 4, max(used) + 5), nobodys, dtype=torch.int32)
    keys, row_values = [], []
    for row, length in enumerate(lengths):
        keys.append(values.normal(length, shape.kv_heads, dim, dtype=dtype))
        row_values.append(values.normal(length, shape.kv_heads, dim, dtype=dtype))
        both = torch.cat([keys[-1], row_values[-1]], 1)
        for i in range(used[row]):
            block = blocks.pop()
            table[slots[row], i] = block
            part = both[i * page : (i + 1) * page]
            cache[block, :, : len(part)] = part.transpose(0, 1)
    total = sum(counts)
    q = poisoned(total + SPARE_TOKENS, (shape.heads + 2 * shape.kv_heads) * dim, dtype=dtype)
    q[:total, : shape.heads * dim] = values.normal(total, shape.heads * dim, dtype=dtype)
    starts = [sum(counts[:row]) for row in range(len(lengths) + 1)]
    decoding = counts.count(1) if num_decode is None else num_decode
    return Batch(
        shape,
        list(lengths),
        counts,
        decoding,
        q,
        cache,
        int32(table.tolist())[:, : max(used) + 2],
        int32(slots),
        # Padding rows look like long ones.
        int32([*lengths, *[page * max(used)] * SPARE_ROWS]),
        int32(starts + [total + 40 * i for i in range(1, 4)]),
        int32([len(lengths), decoding, total, -1]),
        keys,
        row_values,
    )


def with_scores(batch: Batch, softcap: float | None, sinks: float | None) -> Batch:
    """Return the batch of a model with bounded scores, or with sinks of about this size."""
    if sinks is None:
        return replace(batch, softcap=softcap)
    own = Values(batch.shape.heads).normal(batch.shape.heads, dtype=torch.float32)
    return replace(batch, softcap=softcap, sinks=guarded(own + sinks))


SCORES = [(0.7, None), (None, 0.0), (None, 9.0), (None, -300.0), (None, 300.0), (20.0, 2.0)]
"""Softcaps and sinks. Some sinks take nearly all the mass, or nearly none."""


def without_padding(batch: Batch) -> Batch:
    """Return the same batch with arrays that are just as long as the step."""
    rows = len(batch.lengths)
    return replace(
        batch,
        slots=batch.slots[:rows].clone(),
        seq_lens=batch.seq_lens[:rows].clone(),
        query_starts=batch.query_starts[: rows + 1].clone(),
        q=batch.q[: sum(batch.counts)].clone(),
    )


def assert_rows_untouched(batch: Batch, out: Tensor, tokens: slice, what: str) -> None:
    assert_untouched(out[tokens], what)
    assert_untouched(out[sum(batch.counts) :], "rows of padding")
    assert_margins_untouched(out, batch.cache)
