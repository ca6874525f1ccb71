"""The attention backend over random batches, block tables and windows, against float64 without pages or batches."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionShape
from sidestep.executor.attention.torch_backend import TorchAttention
from sidestep.executor.input_batch import make_batch
from sidestep.executor.request_state import RequestState
from tests.unit.executor.steps import Request, make_step

CPU = torch.device("cpu")


def exact(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The last N of L tokens: q [N, H, D]; k, v [L, KVH, D]."""
    count, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    k, v = (t.double().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * dim**-0.5
    query, key = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Sequences:
    """Rows in a cache whose blocks are in random order, with the keys and values that went in."""

    def __init__(self, rows: int, heads: int, kv_heads: int, dim: int, block_size: int, windows: tuple[int, ...],
                 longest: int = 200, seed: int = 0) -> None:
        self.rng, self.block_size, self.heads, self.kv_heads, self.dim = (
            random.Random(seed), block_size, heads, kv_heads, dim)
        torch.manual_seed(seed)
        per_row = -(-longest // block_size)
        self.backend = TorchAttention(
            AttentionShape(num_layers=len(windows), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                           windows=windows), rows * per_row, block_size, torch.float32, CPU)
        self.windows = windows
        self.state = RequestState(rows, longest, block_size, CPU)
        self.free = self.rng.sample(range(rows * per_row), rows * per_row)
        self.lengths, self.blocks = [0] * rows, [0] * rows
        self.kv = [[torch.empty(0, 2 * kv_heads, dim) for _ in windows] for _ in range(rows)]

    def step(self, counts: dict[int, int]) -> None:
        """Computes `counts[row]` more tokens of each row and compares every layer with the exact result."""
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
        self.backend.begin_step(batch, torch.from_numpy(batch.slot_mapping))
        for layer, window in enumerate(self.windows):
            q = torch.randn(sum(counts.values()), self.heads, self.dim)
            kv = torch.randn(len(q), 2 * self.kv_heads, self.dim)
            got = self.backend.attend(layer, q, kv)
            for row, (start, stop) in zip(order, batch.token_ranges, strict=True):
                own = self.kv[row][layer] = torch.cat([self.kv[row][layer], kv[start:stop]])
                expected = exact(q[start:stop], own[:, :self.kv_heads], own[:, self.kv_heads:], window)
                torch.testing.assert_close(got[start:stop].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 2, 24), (6, 1, 20), (1, 1, 80), (8, 2, 7)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_steps_of_prompt_chunks_and_single_tokens(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    sequences = Sequences(6, heads, kv_heads, dim, block_size, (0, 5, 33), seed=heads * dim + block_size)
    sequences.step({0: 1, 1: 1, 2: 13, 3: 40})
    sequences.step({0: 1, 1: 9, 2: 1, 4: 5})
    sequences.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2})
    sequences.step({3: 30, 5: 50, 1: 1})
    sequences.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    sequences.step({3: 1})


def test_many_random_steps_across_block_borders() -> None:
    sequences = Sequences(9, 4, 2, 8, 4, (0, 6), seed=1)
    for _ in range(40):
        rows = sequences.rng.sample(range(9), sequences.rng.randint(1, 9))
        room = {row: 190 - sequences.lengths[row] for row in rows}
        sequences.step({row: sequences.rng.choice([1, 1, 1, min(room[row], sequences.rng.randint(2, 19))])
                        for row in rows if room[row] > 1} or {0: 1})


def test_rows_of_one_length_need_no_mask_and_are_right_too() -> None:
    sequences = Sequences(4, 4, 2, 12, 4, (0, 7), seed=2)
    sequences.step(dict.fromkeys(range(4), 6))
    for _ in range(5):
        sequences.step(dict.fromkeys(range(4), 1))
