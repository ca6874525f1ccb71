"""Rows with masks, sampled by the kernels of a GPU's runner.

The tokens equal those of the CPU's sampler, at the rows' positions in the output.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.gpu.step_packer import StepPacker
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.logits_processor import ProcessorSetup
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialRows
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import StepMasks
from sidestep.kernels.triton.prepare_step_triton import StepLayout
from tests.fakes import SPEC
from tests.triton.sampling.test_special_sampling import MOST, SLOTS, VOCAB, make_runner
from tests.triton.support import DEVICE
from tests.unit.executor.steps import Request, make_step

CHOSEN = [3, 0, 7, 11, 5]
"""Slots of the step's rows."""
HELD = [True, False, True, True, True]
"""Whether each row's request has a grammar."""
ALLOWED = {0: [7, 900], 2: list(range(40, 1400, 7)), 4: [3]}
"""Tokens that a row's mask allows. Row 3 has none: its request has ended in the meantime."""


def make_requests() -> dict[int, Request]:
    return {
        slot: Request(
            [1] * (2 + i),
            9,
            temperature=[0.0, 1.0, 0.7][i % 3],
            top_k=[0, 5][i % 2],
            seed=i,
            controls=Controls(has_grammar=HELD[i]),
        )
        for i, slot in enumerate(CHOSEN)
    }


def make_masking_runner(state: HostTables, masks: GrammarMasks) -> GpuRunner:
    """Return a GPU's runner with what it needs to sample rows with masks."""
    runner = make_runner(state)
    runner._special = SpecialRows([], masks, SLOTS, DEVICE)
    runner._out_ids = torch.full((4, MOST), -1, dtype=torch.int32, device=DEVICE)
    runner._pinned_marks = torch.zeros(4, MOST, dtype=torch.int32)
    runner._host_marks = runner._pinned_marks.numpy()
    runner._marks = torch.zeros(MOST, dtype=torch.int32, device=DEVICE)
    runner._args = WorkerArgs(
        rank=0,
        spec=msgspec.structs.replace(SPEC, vocab_size=VOCAB),
        model=ModelConfig(),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        max_model_len=64,
    )
    return runner


def allowed_bits() -> NDArray[np.uint8]:
    """Return a row for each mask of ALLOWED: 1 for each token that it allows."""
    bits = np.zeros((len(ALLOWED), -(-VOCAB // 32) * 32), np.uint8)
    for row, tokens in zip(bits, ALLOWED.values(), strict=True):
        row[tokens] = 1
    return bits


def test_masked_rows_get_the_sampler_s_tokens_and_plain_rows_are_left_alone() -> None:
    torch.manual_seed(0)
    state, layout = HostTables(SLOTS, 64, 16), StepLayout(8, 32)
    requests = make_requests()
    step = make_step(
        [(slot, len(r.prompt), [i]) for i, (slot, r) in enumerate(requests.items())], requests, 6
    )
    state.apply(step)
    batch = make_batch(state, step, 16)
    masks = GrammarMasks(ProcessorSetup(device=DEVICE, vocab_size=VOCAB, num_slots=SLOTS), 8)
    runner = make_masking_runner(state, masks)
    runner._special.enter(step)
    # The step's own sampling leaves logits with some more columns, and the message.
    memory = torch.randn(MOST, VOCAB + 3, device=DEVICE) * 3
    logits, before = memory[:5, :VOCAB].cpu(), memory.clone()
    runner._logits = memory
    apart = runner._special.find(batch)
    assert apart is not None and apart.masked.tolist() == [0, 2, 3, 4] and not len(apart.special)
    packer = StepPacker(layout, 4, num_buffers=4)
    packer.pack(2, layout, batch, step, apart)
    runner._message = packer.buffers[2].to(DEVICE)
    bits = allowed_bits()
    masks.take(
        step,
        StepMasks(
            6,
            5,
            np.array([0, 2, 4], np.int32),
            np.array([5, 6, 7], np.int32),
            np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(-1),
        ),
    )
    runner._sample_masked(batch, apart.masked, 2, layout)
    rows = np.array(list(ALLOWED))
    logits = torch.where(torch.from_numpy(bits[:, :VOCAB] == 1), logits[rows], -torch.inf)
    expected = Sampler(state)(logits, batch.slots[rows], batch.seq_lens[rows]).tolist()
    assert all(token in ALLOWED[row] for token, row in zip(expected, rows.tolist(), strict=True))
    assert runner._out_ids[2, :5].tolist() == [expected[0], -1, expected[1], -1, expected[2]]
    assert {
        slot: token for slot, token in enumerate(runner._tables.last_sampled.tolist()) if token >= 0
    } == {CHOSEN[row]: token for row, token in zip(rows.tolist(), expected, strict=True)}
    assert torch.equal(memory[[1, 3]], before[[1, 3]]) and torch.equal(memory[5:], before[5:])
