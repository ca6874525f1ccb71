"""The step packer: the device's tables become equal to the host's.

Packed steps run through the first kernel of every step.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from sidestep.executor.gpu.step_packer import StepPacker, masked_logits
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, make_batch
from sidestep.ipc.transport.slot_columns import DEVICE_WORDS, device_word
from sidestep.kernels.triton.prepare_step_triton import (
    DRAFTS,
    LAST_SAMPLED,
    MASKED,
    NUM_COMPUTED,
    ROWS,
    SAMPLING,
    SlotTables,
    StepInputs,
    StepLayout,
    prepare_step,
)
from tests.unit.executor.steps import Request, make_step, schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, LONGEST = 16, 96
ROTATION = 4


def ints(*size: int) -> torch.Tensor:
    return torch.full(size, -7, dtype=torch.int32, device=DEVICE)


def new_tables(slots: int) -> SlotTables:
    return SlotTables(
        block_tables=ints(1, slots, LONGEST // BLOCK),
        parameters=ints(slots, DEVICE_WORDS),
        progress=ints(slots, DRAFTS),
        tokens=ints(slots, LONGEST),
        max_total=device_word("max_total"),
    )


def test_random_requests_reach_the_device_as_the_host_sees_them() -> None:
    rng = random.Random(4)
    requests = [
        Request(
            [rng.randrange(999) for _ in range(rng.randint(1, 40))],
            rng.randint(1, 20),
            temperature=rng.random(),
            top_k=rng.randrange(9),
            top_p=rng.random(),
            min_p=rng.random(),
            temperature_last=rng.random() < 0.5,
            seed=rng.randrange(-(2**63), 2**63),
        )
        for _ in range(7)
    ]
    state, tables = HostTables(7, LONGEST, BLOCK), new_tables(7)
    tables.progress[:, LAST_SAMPLED] = torch.arange(1000, 1007)
    largest = StepLayout(7, 50)
    packer = StepPacker(largest, LONGEST // BLOCK, ROTATION)
    message = ints(len(packer.buffers[0]))
    for number, (step, _) in enumerate(schedule(requests, 50, BLOCK)):
        state.apply(step)
        batch = make_batch(state, step, BLOCK)
        # Alternate between the smallest layout, as a captured graph has it, and the largest, as
        # eager steps have it.
        rows, tokens = len(batch.slots), batch.total_tokens
        layout = StepLayout(rows, tokens + 3) if number % 2 else largest
        used = packer.pack(number % ROTATION, layout, batch, step)
        message.fill_(-7)
        message[:used].copy_(packer.buffers[number % ROTATION][:used])
        inputs = StepInputs(
            *(ints(tokens + 3), ints(tokens + 3), ints(1, tokens + 3)),
            *(ints(rows) for _ in range(8)),
        )
        prepare_step(message, layout, tables, inputs, BLOCK)
        expected = np.where(batch.token_ids < 0, 1000 + batch.row_slots, batch.token_ids)
        assert inputs.token_ids.tolist() == [*expected.tolist(), 0, 0, 0]
        assert inputs.positions.tolist() == [*batch.positions.tolist(), 0, 0, 0]
        assert inputs.slot_mapping[0].tolist() == [*batch.slot_mapping[0].tolist(), -1, -1, -1]
        assert inputs.last_tokens.tolist() == (batch.query_starts[1:] - 1).tolist()
        assert inputs.seq_lens.tolist() == batch.seq_lens.tolist()
        # The kernels that sample advance the slots.
        tables.progress[batch.slots, NUM_COMPUTED] = inputs.seq_lens
        assert message[:MASKED].tolist() == [rows, batch.num_decode_rows, tokens]
        assert message[SAMPLING : SAMPLING + 2].tolist() == [rows, number % ROTATION]
        assert message[ROWS : ROWS + 2].tolist() == [rows, number % ROTATION]
        at = layout.at("samples")
        assert message[at : at + rows].tolist() == batch.samples.astype(int).tolist()
    for slot, request in enumerate(requests):
        own = tables.parameters[slot].cpu().numpy()
        at = device_word("seed")
        assert own[at : at + 2].view(np.int64)[0] == request.seed
        assert own[device_word("top_k")] == request.top_k
        assert own[device_word("temperature_last")] == request.temperature_last
        assert own[device_word("max_total")] == len(request.prompt) + request.max_tokens
        for name in ("temperature", "top_p", "min_p"):
            found = own[device_word(name)].view(np.float32)
            assert found == np.float32(getattr(request, name))
        computed = len(request.prompt) + request.max_tokens - 1
        known = tables.tokens[slot, : len(request.prompt)].tolist()
        assert tables.progress[slot, NUM_COMPUTED] == computed and known == request.prompt
        held = int(state.num_blocks[slot])
        assert (
            tables.block_tables[0, slot, :held].tolist()
            == state.block_tables[0, slot, :held].tolist()
        )


def test_stop_tokens_are_masked_until_there_are_enough_outputs() -> None:
    state = HostTables(3, LONGEST, BLOCK)
    entering = {
        0: Request([1], 9),
        1: Request([1, 2], 9, min_tokens=2, stop_ids=[5, 9]),
        2: Request([3, 3, 3, 3], 9, min_tokens=1, stop_ids=[4]),
    }
    listed = []
    for rows, new in (
        ([(0, 1, [0]), (1, 2, [1]), (2, 3, [2])], entering),
        ([(0, 1, []), (1, 1, []), (2, 1, [])], {}),
        ([(0, 1, []), (1, 1, []), (2, 1, [])], {}),
    ):
        step = make_step(rows, new)
        state.apply(step)
        batch = make_batch(state, step, BLOCK)
        found = masked_logits(state, batch.slots, batch.seq_lens, batch.samples)
        listed.append(list(zip(*(column.tolist() for column in found), strict=True)))
    # Row 2's prompt ends in the second step only; then each row has one output fewer to wait for.
    first, then = (1, 5, 4), (1, 9, 4)
    assert listed == [[first, then], [first, then, (2, 4, 5)], []]


def test_special_and_masked_rows_are_left_to_others() -> None:
    """Check that the step itself does not sample these rows.

    Its batch still says that they sample. Stop tokens of masked rows, which are sampled from the
    step's own logits, take effect at once.
    """
    state, layout = HostTables(4, 64, BLOCK), StepLayout(4, 16)
    packer = StepPacker(layout, 8, ROTATION)
    entering = {i: Request([3, 3], 9, min_tokens=1, stop_ids=[4 + i]) for i in range(4)}
    step = make_step([(0, 2, [0]), (1, 2, [1]), (2, 2, [2]), (3, 2, [3])], entering)
    state.apply(step)
    batch = make_batch(state, step, BLOCK)
    used = packer.pack(0, layout, batch, step, Apart(special=np.array([1]), masked=np.array([3])))
    words = packer.buffers[0].numpy()
    assert words[layout.at("samples") :][:4].tolist() == [1, 0, 1, 0]
    used -= 4 * DEVICE_WORDS  # the records come last
    assert words[used - 9 : used].tolist() == [0, 2, 3, 4, 6, 7, 3, 3, 3]
    assert batch.samples.all()
