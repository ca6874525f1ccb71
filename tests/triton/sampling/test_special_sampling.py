"""Special rows, sampled by the kernels of a GPU's runner.

The tokens equal those of the CPU's sampler, at the rows' positions in the output.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialBatch
from sidestep.kernels.triton.prepare_step_triton import SlotTables
from sidestep.kernels.triton.sampling_triton import scratch_size
from tests.triton.support import DEVICE
from tests.unit.executor.steps import Request, make_step

VOCAB, SLOTS, MOST = 1500, 12, 20


def make_runner(state: HostTables) -> GpuRunner:
    """Return a GPU's runner with only the parts that sample."""
    runner = object.__new__(GpuRunner)
    runner._device = DEVICE
    runner._state = state
    runner._tables = SlotTables(
        block_tables=torch.zeros(SLOTS, 1, dtype=torch.int32, device=DEVICE),
        last_sampled=torch.full((SLOTS,), -1, dtype=torch.int32, device=DEVICE),
        temperature=torch.from_numpy(state.temperature).to(DEVICE),
        top_p=torch.from_numpy(state.top_p).to(DEVICE),
        min_p=torch.from_numpy(state.min_p).to(DEVICE),
        top_k=torch.from_numpy(state.top_k).to(DEVICE),
        seed=torch.from_numpy(state.seed).to(DEVICE),
    )
    runner._scratch = torch.empty(scratch_size(MOST, VOCAB), dtype=torch.int32, device=DEVICE)
    runner._special_ids = torch.full((4, MOST), -1, dtype=torch.int32, device=DEVICE)
    return runner


@pytest.mark.parametrize("first", [0, 8])
def test_special_rows_get_the_sampler_s_tokens(first: int) -> None:
    torch.manual_seed(first)
    state = HostTables(SLOTS, 64, 16)
    chosen = [3, 0, 7, 11, 5]
    requests = {
        slot: Request(
            [1] * (2 + i),
            9,
            temperature=[0.0, 1.0, 0.7][i % 3],
            top_k=[0, 5][i % 2],
            seed=i,
            min_tokens=i % 2,
            stop_ids=[10, 11] if i % 2 else [],
        )
        for i, slot in enumerate(chosen)
    }
    state.apply(make_step([(slot, len(r.prompt), [0]) for slot, r in requests.items()], requests))
    slots = np.array(chosen, np.int32)
    seq_lens = np.array([len(r.prompt) for r in requests.values()], np.int32)
    logits = torch.randn(5, VOCAB) * 3
    logits[:, 10] = 90.0  # tokens that some rows must not sample yet
    expected = Sampler(state)(logits, slots, seq_lens)
    runner = make_runner(state)
    part = SpecialBatch(
        first=first,
        rows=np.arange(5),
        samples=np.arange(5),
        slots=slots,
        seq_lens=seq_lens,
        logits_rows=torch.arange(5, device=DEVICE),
        slot_index=torch.tensor(chosen, device=DEVICE),
    )
    got = runner._sample_special(logits.to(DEVICE), part, 2)
    assert got.tolist() == expected.tolist()
    assert set(expected[[0, 2, 4]].tolist()) == {10} and 10 not in expected[[1, 3]].tolist()
    assert runner._special_ids[2, first : first + 5].tolist() == expected.tolist()
    assert int((runner._special_ids >= 0).sum()) == 5
    assert [slot for slot in range(SLOTS) if runner._tables.last_sampled[slot] >= 0] == sorted(
        chosen
    )
