"""Attention over a paged cache, by itself, which gpu_kernels.py times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.gpu_models import Model
from benchmarks.kernels.gpu_timing import (
    DEVICE,
    DTYPE,
    L2_BYTES,
    Call,
    microseconds,
    relative_error,
    repeated,
)
from sidestep.kernels.attention.attention_plan_triton import plan_attention
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.hopper import prefill_hopper
from sidestep.kernels.attention.prefill_attention_triton import (
    PrefillConfig,
    prefill_attention,
    prefill_config,
)


class Paged:
    """Batch over a paged cache, with copies that are together larger than L2."""

    def __init__(
        self,
        model: Model,
        lengths: Sequence[int],
        counts: Sequence[int],
        block_size: int,
        copies: int,
        queries: int = 1,
    ) -> None:
        self.model, self.block_size, self.queries = model, block_size, queries
        rows = len(lengths)
        blocks = [math.ceil(n / block_size) for n in lengths]
        order = torch.randperm(sum(blocks), dtype=torch.int32)
        self.tables = torch.zeros(rows, max(blocks), dtype=torch.int32)
        at = 0
        for row, n in enumerate(blocks):
            self.tables[row, :n] = order[at : at + n]
            at += n
        self.tables = self.tables.to(DEVICE)
        shape = (sum(blocks), 2 * model.kv_heads, block_size, model.head_dim)
        self.caches = [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
        self.lengths, self.counts = list(lengths), list(counts)
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        starts = [0, *itertools.accumulate(counts)]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        decodes = rows if max(counts) == queries else 0
        self.header = torch.tensor([rows, decodes, starts[-1]], dtype=torch.int32, device=DEVICE)
        padded = max(16, 1 << (rows - 1).bit_length())  # as executor/attention/triton_backend.py
        self.decode_ends = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
        self.prefill_ends = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(starts[-1], model.heads * model.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.full_like(self.q, math.nan)

    def plan(self, tile: int, tokens: int) -> None:
        """Count the tiles, and wait until the counts are written."""
        plan_attention(
            self.seq_lens,
            self.query_starts,
            self.header,
            self.decode_ends,
            self.prefill_ends,
            tile=tile,
            tokens=tokens,
            window=0,
            queries=self.queries,
        )
        torch.cuda.synchronize()

    def plan_few(self, scratch: DecodeScratch) -> Tensor | None:
        """Return the work of the kernel of few rows, if the scratch has one; plan comes before."""
        if scratch.few is None:
            return None
        work = scratch.few.new_work(len(self.decode_ends))
        scratch.few.plan(
            work, self.decode_ends, self.seq_lens, self.slots, self.tables, self.block_size, 0
        )
        torch.cuda.synchronize()
        return work

    def keys_values(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a row's keys and values in the first copy, [KVH, length, D] each."""
        table = self.tables[row, : math.ceil(self.lengths[row] / self.block_size)].long()
        both = self.caches[0][table].transpose(0, 1).flatten(1, 2)[:, : self.lengths[row]]
        return both[: self.model.kv_heads], both[self.model.kv_heads :]

    def error(self, rows: Iterable[int]) -> float:
        """Return the largest relative error of these rows against a float64 reference.

        Only the last 64 tokens of long prompts are compared.
        """
        worst, starts, m = 0.0, self.query_starts.tolist(), self.model
        for row in rows:
            keys, values = self.keys_values(row)
            first = max(starts[row], starts[row + 1] - 64)
            shape = (-1, m.kv_heads, m.heads // m.kv_heads, m.head_dim)
            q = self.q[first : starts[row + 1]].view(shape).double()
            length, n = self.lengths[row], q.shape[0]
            scores = torch.einsum("nkgd,kld->kgnl", q, keys.double()) * m.head_dim**-0.5
            positions = torch.arange(length - n, length, device=DEVICE)
            hidden = torch.arange(length, device=DEVICE)[None] > positions[:, None]
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            reference = torch.einsum("kgnl,kld->nkgd", weights, values.double())
            worst = max(
                worst, relative_error(self.out[first : starts[row + 1]].view(shape), reference)
            )
        return worst


class Decode:
    """Decode attention of one batch, with as many query tokens in each row."""

    def __init__(
        self,
        model: Model,
        lengths: Sequence[int],
        block_size: int = 64,
        copies: int = 0,
        queries: int = 1,
    ) -> None:
        self.bytes = sum(lengths) * 2 * model.kv_heads * model.head_dim * 2
        copies = copies or math.ceil(L2_BYTES / self.bytes)
        self.batch = Paged(model, lengths, [queries] * len(lengths), block_size, copies, queries)
        self.model, self.queries = model, queries

    def calls(self, config: DecodeConfig) -> list[Call]:
        """Return one call for each copy of the cache."""
        m, b = self.model, self.batch
        scratch = DecodeScratch(
            m.heads, m.kv_heads, m.head_dim, len(b.lengths), DEVICE, config, self.queries
        )
        # As with drafts, of which the host does not know how many are valid.
        valid_lens = b.seq_lens if self.queries > 1 else None
        b.plan(config.tile, 16)

        def call(cache: Tensor) -> None:
            decode_attention(
                b.q,
                cache,
                b.tables,
                b.slots,
                b.seq_lens,
                b.decode_ends,
                b.out,
                scratch,
                num_heads=m.heads,
                window=0,
                scale=m.head_dim**-0.5,
                queries=self.queries,
                valid_lens=valid_lens,
            )

        return [lambda cache=cache: call(cache) for cache in b.caches]

    def time(self, config: DecodeConfig) -> float:
        """Return the time in microseconds, or infinity if the result is wrong."""
        calls = self.calls(config)
        self.batch.out.fill_(math.nan)
        calls[0]()
        rows = len(self.batch.lengths)
        error = self.batch.error(sorted({0, rows - 1, rows // 2, rows // 3}))
        if error > 1e-2:
            print(f"wrong: {config} error {error}")
            return math.inf
        return microseconds(repeated(calls, 40 if self.bytes < 1 << 28 else 6))

    def library(self) -> float:
        """Return the time of torch's attention over contiguous keys and values of equal lengths.

        It has no mask, which costs it nothing.
        """
        m, rows, length = self.model, len(self.batch.lengths), self.batch.lengths[0]
        shape = (rows, m.kv_heads, length, m.head_dim)
        q = self.batch.q.view(rows, self.queries, m.heads, m.head_dim).transpose(1, 2)
        copies = min(len(self.batch.caches), 40)
        pairs = [
            (
                torch.randn(shape, dtype=DTYPE, device=DEVICE),
                torch.randn(shape, dtype=DTYPE, device=DEVICE),
            )
            for _ in range(copies)
        ]
        calls: list[Call] = [
            lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]
        return microseconds(repeated(calls, 6))


class Prefill:
    """Causal attention of whole prompts."""

    def __init__(self, model: Model, lengths: Sequence[int], block_size: int = 64) -> None:
        self.operations = sum(4 * model.heads * model.head_dim * n * (n + 1) / 2 for n in lengths)
        self.batch = Paged(model, lengths, lengths, block_size, 2)
        self.model = model

    @property
    def shipped(self) -> PrefillConfig:
        """The configuration that the engine takes."""
        taken = prefill_hopper.takes(self.batch.caches[0], DTYPE, self.model.heads)
        return prefill_config(self.model.head_dim, DTYPE.itemsize, hopper=taken)

    def calls(self, config: PrefillConfig) -> list[Call]:
        """Return one call for each copy of the cache."""
        m, b = self.model, self.batch
        b.plan(64, config.tokens(m.heads // m.kv_heads))

        def call(cache: Tensor) -> None:
            prefill_attention(
                b.q,
                cache,
                b.tables,
                b.slots,
                b.seq_lens,
                b.query_starts,
                b.prefill_ends,
                b.out,
                config,
                num_heads=m.heads,
                max_tokens=b.q.shape[0],
                max_rows=len(b.lengths),
                window=0,
                scale=m.head_dim**-0.5,
            )

        return [lambda cache=cache: call(cache) for cache in b.caches]

    def time(self, config: PrefillConfig) -> float:
        """Return the time in microseconds, or infinity if the result is wrong."""
        calls = self.calls(config)
        self.batch.out.fill_(math.nan)
        calls[0]()
        error = self.batch.error({0, len(self.batch.lengths) - 1})
        if error > 1e-2 or not bool(self.batch.out.isfinite().all()):
            print(f"wrong: {config} error {error}")
            return math.inf
        return microseconds(repeated(calls, 4), 5)

    def library(self) -> float:
        """Return the time of torch's attention over contiguous keys and values."""
        m, rows, length = self.model, len(self.batch.lengths), self.batch.lengths[0]
        q = torch.randn(rows, m.heads, length, m.head_dim, dtype=DTYPE, device=DEVICE)
        k, v = torch.randn(2, rows, m.kv_heads, length, m.head_dim, dtype=DTYPE, device=DEVICE)
        return microseconds(
            [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 4,
            5,
        )
