"""The host's tables and the layout of a step."""

from __future__ import annotations

import numpy as np

from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch, make_batch
from sidestep.ipc.transport.step import StepInput
from tests.unit.executor.steps import Request, make_step, schedule

BLOCK = 4


def new_state(slots: int = 4) -> HostTables:
    return HostTables(slots, 64, BLOCK)


def run(state: HostTables, step: StepInput) -> HostBatch:
    state.apply(step)
    return make_batch(state, step, BLOCK)


def test_a_prompt_in_chunks_and_then_its_tokens() -> None:
    state, prompt = new_state(), list(range(100, 110))
    first = run(state, make_step([(2, 6, [7, 3])], {2: Request(prompt, 5)}))
    assert first.token_ids.tolist() == prompt[:6]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.slot_mapping[0].tolist() == [28, 29, 30, 31, 12, 13]
    assert (
        first.sampling_rows.tolist() == first.logits_tokens.tolist() == first.unknown.tolist() == []
    )
    second = run(state, make_step([(2, 4, [9])]))
    assert second.token_ids.tolist() == prompt[6:]
    assert second.slot_mapping[0].tolist() == [14, 15, 36, 37]
    assert (second.sampling_rows.tolist(), second.logits_tokens.tolist()) == ([0], [3])
    third = run(state, make_step([(2, 1, [])]))
    assert (third.positions.tolist(), third.unknown.tolist(), third.row_slots.tolist()) == (
        [10],
        [0],
        [2],
    )
    assert third.slot_mapping[0].tolist() == [38]
    assert third.seq_lens.tolist() == [11]


def test_a_mixed_step_has_single_tokens_first() -> None:
    state = new_state()
    run(state, make_step([(0, 3, [0])], {0: Request([1, 2, 3], 9)}))
    entering = {1: Request([8], 2), 3: Request([5] * 7, 2)}
    batch = run(state, make_step([(0, 1, []), (1, 1, [2]), (3, 5, [4, 5])], entering))
    assert batch.num_decode_rows == 2
    assert batch.token_ids.tolist() == [-1, 8, 5, 5, 5, 5, 5]
    assert (batch.unknown.tolist(), batch.row_slots[batch.unknown].tolist()) == ([0], [0])
    assert batch.token_ranges == [(0, 1), (1, 2), (2, 7)]
    assert batch.sampling_rows.tolist() == [0, 1], "the third row has two prompt tokens left"
    assert batch.logits_tokens.tolist() == [0, 1]


def test_a_prefix_that_is_in_the_cache_is_not_computed() -> None:
    state = new_state()
    batch = run(
        state, make_step([(1, 3, [5, 6, 8])], {1: Request(list(range(11)), 2, num_computed=8)})
    )
    assert batch.token_ids.tolist() == [8, 9, 10]
    assert batch.slot_mapping[0].tolist() == [32, 33, 34]
    assert batch.sampling_rows.tolist() == [0]


def test_a_slot_that_is_taken_again_remembers_nothing() -> None:
    state = new_state()
    run(
        state,
        make_step(
            [(1, 9, [1, 2, 3])],
            {1: Request([4] * 9, 2, temperature=1.0, stop_ids=[3], min_tokens=2)},
        ),
    )
    batch = run(state, make_step([(1, 2, [6])], {1: Request([7, 9], 2)}))
    assert (batch.token_ids.tolist(), batch.slot_mapping[0].tolist()) == ([7, 9], [24, 25])
    assert (state.temperature[1], state.min_tokens[1], len(state.stop_ids[1])) == (0, 0, 0)


def test_nothing_kept_is_a_view_of_the_step() -> None:
    """The bytes under a step's columns are reused for the next one."""
    state = new_state()
    step = make_step([(0, 3, [2])], {0: Request([1, 2, 3], 4, stop_ids=[5, 6], min_tokens=3)})
    state.apply(step)
    for name in ("new_token_ids", "new_stop_ids", "block_ids"):
        getattr(step, name).fill(-1)
    assert state.token_ids[0, :3].tolist() == [1, 2, 3]
    assert state.stop_ids[0].tolist() == [5, 6]
    assert state.block_tables[0, 0, 0] == 2


def test_whole_runs_give_every_token_its_own_place() -> None:
    requests = [Request([i] * (3 * i + 1), 4) for i in range(8)]
    state, seen, sampled = new_state(8), set[int](), 0
    for step, sampling in schedule(requests, budget=11, block_size=BLOCK):
        batch = run(state, step)
        written = set(batch.slot_mapping[0].tolist())
        assert len(written) == batch.slot_mapping.size <= 11
        assert not written & seen
        assert [requests[s] for s in batch.slots[batch.sampling_rows]] == sampling
        seen |= written
        sampled += len(sampling)
    assert sampled == 8 * 4
    assert np.array_equal(state.num_computed, [3 * i + 1 + 3 for i in range(8)])


def test_a_forced_token_takes_the_place_of_the_sampled_one() -> None:
    state = HostTables(4, 64, 4)
    requests = {slot: Request([5, 6, 7], 9) for slot in (0, 1, 3)}
    step = make_step([(slot, 3, [slot]) for slot in requests], requests)
    state.apply(step)
    make_batch(state, step, 4)
    step = make_step([(3, 1, []), (0, 1, []), (1, 1, [])])
    step.forced_slots, step.forced_tokens = np.array([3, 1], np.int32), np.array([8, 9], np.int32)
    state.apply(step)
    batch = make_batch(state, step, 4)
    assert batch.token_ids.tolist() == [8, -1, 9] and batch.unknown.tolist() == [1]
