"""Every attention backend against float64 without pages or batches.

Batches, block tables and windows are random. The tests run on a GPU, or on the CPU: there Triton's
kernels run in its interpreter, and backends that need a GPU are skipped. A backend that does not
compute in float32 is tested in bfloat16, one that does not take a size of heads with its own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.attention.base import (
    AttentionBackend,
    AttentionSetup,
    AttentionShape,
    DeviceRows,
    StepBatch,
)
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch, make_batch
from sidestep.ipc.common import registry
from sidestep.ipc.model.layer_size import KvFormat, LayerKv
from sidestep.ipc.model.layer_spec import RopeSpec
from sidestep.kernels.ops.kv_quantization import dequantize, quantize
from tests.unit.executor.steps import Request, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAST = DEVICE.type == "cuda"
"""Whether a GPU runs the kernels; Triton's interpreter takes seconds for a GPU's moment."""
ON_GPU = pytest.mark.skipif(not FAST, reason="slow without a GPU")
EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
}
CODES_TOLERANCE = {
    "int8": {"rtol": 0.0, "atol": 0.03},
    "fp8": {"rtol": 0.0, "atol": 0.15},
    "int4": {"rtol": 0.0, "atol": 0.3},
}
pytestmark = pytest.mark.timeout(600)
"""Seconds for a test: a backend may compile its kernels when they are first used."""


@pytest.fixture(params=registry.ATTENTION_BACKENDS)
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    found: type[AttentionBackend] = registry.load(registry.ATTENTION_BACKENDS[request.param])
    reason = found.missing(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    return found


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the exact attention of the last N of L tokens. q [N, H, D]; k, v [L, KVH, D]."""
    count, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    k, v = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * dim**-0.5
    query, key = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., :length], v)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x: Tensor, first: int) -> Tensor:
    """Return the rotary embedding of x [N, H, D], whose tokens begin at position `first`."""
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + len(x)).double()[:, None] / 10000.0 ** (
        torch.arange(half).double() / half
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def apart(x: Tensor, columns: int) -> Tensor:
    """Return a copy of x [T, N] whose rows lie apart, as parts of a larger product do."""
    return torch.cat([x, x.new_full((len(x), columns), torch.nan)], 1)[:, : x.shape[1]]


class Sequences:
    """Rows in a cache with blocks in random order, and the keys and values that went in."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        rows: int,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        windows: tuple[int, ...],
        longest: int = 200,
        seed: int = 0,
        softcaps: tuple[float | None, ...] = (),
        has_sinks: bool = False,
        kv_format: KvFormat = "model",
    ) -> None:
        dim = dim if not backend.head_dims or dim in backend.head_dims else backend.head_dims[0]
        self.dtype = torch.float32 if torch.float32 in backend.dtypes else torch.bfloat16
        self.rng, self.block_size, self.heads, self.kv_heads, self.dim = (
            random.Random(seed),
            block_size,
            heads,
            kv_heads,
            dim,
        )
        torch.manual_seed(seed)
        per_row = -(-longest // block_size)
        shape = AttentionShape(
            num_layers=len(windows),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            windows=windows,
            softcaps=softcaps,
            has_sinks=has_sinks,
            kept=(LayerKv(num_kv_heads=kv_heads, head_dim=dim, format=kv_format),) * len(windows),
        )
        self.kv_format = kv_format
        self.shape, self.sinks = shape, torch.randn(heads) if has_sinks else None
        self.backend = backend(
            AttentionSetup(
                shape=shape,
                num_blocks=rows * per_row,
                block_size=block_size,
                dtype=self.dtype,
                device=DEVICE,
                rotary=[RotaryTable(RopeSpec(theta=10000.0), dim, longest, DEVICE)],
                norm_eps=EPS,
                max_rows=rows,
                queries=(1, 2, 3, 4, 5),
            )
        )
        self.windows, self.longest = windows, longest
        self.state = HostTables(rows, longest, block_size)
        self.free = self.rng.sample(range(rows * per_row), rows * per_row)
        self.lengths, self.blocks = [0] * rows, [0] * rows
        self.kv = [
            [torch.empty(0, 2 * kv_heads, dim, dtype=torch.float64) for _ in windows]
            for _ in range(rows)
        ]

    def step(self, counts: dict[int, int], queries: int = 1) -> None:
        """Compute `counts[row]` more tokens of each row.

        With several queries, each row is a decode row of that many tokens. Compare every layer with
        the exact result.
        """
        order = sorted(counts, key=lambda row: counts[row] > 1)
        rows, entering = [], {}
        for row in order:
            needed = -(-(self.lengths[row] + counts[row]) // self.block_size) - self.blocks[row]
            rows.append((row, counts[row], [self.free.pop() for _ in range(needed)]))
            if self.lengths[row] == 0:
                entering[row] = Request([1] * counts[row], 1)
            self.blocks[row] += needed
            self.lengths[row] += counts[row]
        step = make_step(rows, entering)
        self.state.apply(step)
        batch = make_batch(self.state, step, self.block_size)
        self.backend.begin_step(self.on_device(batch, queries))
        for layer, window in enumerate(self.windows):
            norms = (
                None
                if layer % 2
                else (
                    self.rounded(torch.rand(self.dim) + 0.5),
                    self.rounded(torch.rand(self.dim) + 0.5),
                )
            )
            qkv = self.rounded(
                torch.randn(batch.total_tokens, self.heads + 2 * self.kv_heads, self.dim)
            )
            sinks = None if self.sinks is None else self.sinks.to(DEVICE)
            on_device = None if norms is None else (norms[0].to(DEVICE), norms[1].to(DEVICE))
            got = (
                self.backend.attend(
                    layer, apart(qkv.flatten(1).to(DEVICE), self.dim), on_device, sinks
                )
                .cpu()
                .double()
            )
            for row, (start, stop) in zip(order, batch.token_ranges, strict=True):
                expected = self.expected(row, layer, window, qkv[start:stop].double(), norms)
                tolerance: Any = TOLERANCE[self.dtype]
                if self.kv_format != "model":  # where rounding decides, a code differs by one
                    tolerance = CODES_TOLERANCE[self.kv_format]
                torch.testing.assert_close(got[start:stop], expected, **tolerance)

    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def expected(
        self, row: int, layer: int, window: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return the exact attention [N, H * D] of a row's new tokens."""
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if norms is not None:
            q, k = normed(q, norms[0]), normed(k, norms[1])
        first = self.lengths[row] - len(qkv)
        q, k = turned(q, first), turned(k, first)
        kv = torch.cat([k, v], 1)
        if self.kv_format != "model":
            kv = dequantize(*quantize(self.rounded(kv), self.kv_format), self.kv_format).double()
        own = self.kv[row][layer] = torch.cat([self.kv[row][layer], kv])
        scores = self.shape.softcap(layer), self.sinks
        return exact(q, own[:, : self.kv_heads], own[:, self.kv_heads :], window, *scores).flatten(
            1
        )

    def on_device(self, batch: HostBatch, queries: int) -> StepBatch:
        def tensor(values: object) -> Tensor:
            return torch.from_numpy(np.asarray(values).astype(np.int32)).to(DEVICE)

        rows = len(batch.slots)
        decodes = batch.num_decode_rows if queries == 1 else rows
        return StepBatch(
            positions=tensor(batch.positions),
            slot_mapping=tensor(batch.slot_mapping),
            host=batch,
            rows=DeviceRows(
                header=tensor([rows, decodes]),
                slots=tensor(batch.slots),
                seq_lens=tensor(batch.seq_lens),
                query_starts=tensor(batch.query_starts),
                block_tables=tensor(self.state.block_tables),
                max_decode_rows=decodes,
                max_prompt_rows=rows - decodes,
                queries=queries,
            ),
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [
        (4, 2, 24, 16),
        (10, 2, 6, 48),
        *(
            pytest.param(*shape, marks=ON_GPU)
            for shape in ((4, 4, 16, 16), (6, 1, 20, 48), (1, 1, 80, 16), (16, 1, 128, 64))
        ),
    ],
)
def test_mixed_steps_of_prompt_chunks_and_single_tokens(
    backend: type[AttentionBackend], heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    sequences = Sequences(
        backend, 6, heads, kv_heads, dim, block_size, (0, 9), seed=heads * dim + block_size
    )
    sequences.step({0: 1, 1: 1, 2: 13, 3: 40})
    sequences.step({0: 1, 1: 9, 2: 1, 4: 5})
    sequences.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2})
    sequences.step({3: 30, 5: 50, 1: 1})
    sequences.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    sequences.step({3: 1})


def test_many_random_steps_across_block_borders(backend: type[AttentionBackend]) -> None:
    sequences = Sequences(backend, 9, 4, 2, 8, 16, (0, 6), longest=200 if FAST else 90, seed=1)
    for _ in range(25 if FAST or "Torch" in backend.__name__ else 5):
        rows = sequences.rng.sample(range(9), sequences.rng.randint(1, 9))
        room = {row: sequences.longest - 10 - sequences.lengths[row] for row in rows}
        sequences.step(
            {
                row: sequences.rng.choice([1, 1, 1, min(room[row], sequences.rng.randint(2, 19))])
                for row in rows
                if room[row] > 1
            }
            or {0: 1}
        )


@pytest.mark.parametrize("queries", [2, 5])
def test_decode_rows_of_several_queries(backend: type[AttentionBackend], queries: int) -> None:
    """Cover steps of few tokens and of few rows, with a window smaller than the queries too."""
    sequences = Sequences(backend, 6, 8, 2, 24, 16, (0, 3), seed=queries)
    sequences.step({0: 14, 1: 1, 2: 30, 3: 2, 4: 16, 5: 7})
    for rows in (range(6), range(3), [5]):
        sequences.step(dict.fromkeys(rows, queries), queries)
        sequences.step(dict.fromkeys(rows, 1))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_bounded_scores_and_sinks(backend: type[AttentionBackend], has_sinks: bool) -> None:
    """Cover layers with and without a bound, with one or two windows."""
    if "FlashInfer" in backend.__name__:
        pytest.skip("refuses such models")
    softcaps = (None, None) if has_sinks else (2.0, None)
    sequences = Sequences(
        backend, 4, 6, 2, 24, 16, (0, 9), seed=4, softcaps=softcaps, has_sinks=has_sinks
    )
    for counts in ({0: 1, 1: 30, 2: 9}, {0: 1, 1: 1, 2: 1}, {0: 12, 1: 1, 3: 40}):
        sequences.step(counts)


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_torch_backend_takes_blocks_of_any_size(block_size: int) -> None:
    sequences = Sequences(
        registry.load(registry.ATTENTION_BACKENDS["torch"]), 3, 4, 2, 8, block_size, (0, 6), seed=3
    )
    for counts in ({0: 13, 1: 1, 2: 4}, {0: 1, 1: 9, 2: 1}, {0: 1, 1: 1, 2: 1}):
        sequences.step(counts)


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_codes_are_read_as_they_were_written(
    backend: type[AttentionBackend], kv_format: KvFormat
) -> None:
    """Cover prompts, decodes that gather, decodes that add to what was gathered, and drafts."""
    if not backend.keeps_codes:
        pytest.skip("it is refused")
    sequences = Sequences(backend, 4, 4, 2, 16, 16, (0, 9), seed=8, kv_format=kv_format)
    for counts in ({0: 1, 1: 30, 2: 9}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 12, 3: 5}):
        sequences.step(counts)
    if backend.graph_safe:
        sequences.step(dict.fromkeys(range(4), 3), queries=3)


def test_rows_of_one_length_need_no_mask_and_are_right_too(backend: type[AttentionBackend]) -> None:
    sequences = Sequences(backend, 4, 4, 2, 12, 16, (0, 7), seed=2)
    sequences.step(dict.fromkeys(range(4), 6))
    for _ in range(3):
        sequences.step(dict.fromkeys(range(4), 1))


def test_blocks_are_copied_in_all_layers(backend: type[AttentionBackend]) -> None:
    made = backend(
        AttentionSetup(
            shape=AttentionShape(
                num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, windows=(0, 0, 0)
            ),
            num_blocks=9,
            block_size=16,
            dtype=backend.dtypes[0],
            device=DEVICE,
            max_rows=8,
            norm_eps=EPS,
            rotary=[RotaryTable(RopeSpec(theta=10000.0), 64, 64, DEVICE)],
        )
    )
    torch.manual_seed(0)
    memories = [made.cache.of_layer(layer) for layer in range(3)]
    for memory in memories:
        memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8))
    before = [memory.clone() for memory in memories]
    made.copy_blocks(np.array([3, 3, 0, 8, 5], np.int32), np.array([1, 2, 4, 7, 6], np.int32))
    for memory, kept in zip(memories, before, strict=True):
        kept[[1, 2, 4, 7, 6]] = kept[[3, 3, 0, 8, 5]]
        assert torch.equal(memory, kept)
