"""Pressure on the scheduler: too few blocks, seats or slots, or too little time."""

import msgspec
import numpy as np
import pytest

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.messages import FinishReason
from sidestep.ipc.transport.step import StepOutput
from tests.fakes import VOCAB_SIZE, Clock, Engine, make_request, make_scheduler


def num_computed(engine: Engine) -> int:
    return sum(int(step.num_tokens.sum()) for step in engine.steps)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_request_runs_at_once_when_the_one_it_displaces_has_nothing_in_flight(
    depth: int,
) -> None:
    engine = Engine(make_scheduler(policy="priority", max_num_seqs=1, overlap=depth == 2), depth)
    engine.scheduler.add(make_request([1], 30, handle=0, priority=5))
    engine.launch()
    engine.take()
    engine.scheduler.add(make_request([2], 5, handle=1, priority=0))
    assert engine.launch(), "the core would go to sleep here"
    engine.run()
    assert list(engine.finished) == [1, 0]


def test_an_urgent_request_displaces_nobody_if_that_does_not_help() -> None:
    engine = Engine(make_scheduler(policy="priority", num_blocks=8, block_size=4))
    engine.scheduler.add(make_request([1] * 20, 8, handle=0, priority=0))
    engine.scheduler.add(make_request([2], 4, handle=1, priority=5))
    engine.turn()
    engine.scheduler.add(make_request([3] * 24, 4, handle=2, priority=0))
    engine.run()
    assert [engine.finished[h].num_preemptions for h in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_enters_when_all_of_it_fits_so_that_nothing_is_computed_twice(
    caching: bool,
) -> None:
    engine = Engine(make_scheduler(num_blocks=60, budget=32, prefix_caching=caching))
    engine.scheduler.add(make_request([1] * 60, 100, handle=0))
    engine.turn()
    long = [2 + i % 40 for i in range(192)]
    engine.scheduler.add(make_request(long, 4, handle=1))
    engine.run()
    assert num_computed(engine) == 60 + 99 + 192 + 3
    assert engine.scheduler.stats()["num_preemptions"] == 0


def test_the_seat_of_a_request_whose_last_token_is_on_its_way_is_taken_at_once() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    for handle in range(8):
        engine.scheduler.add(make_request([1 + handle], 1, handle=handle))
    turns = 0
    while engine.turn():
        turns += 1
        assert len(engine.finished) == 8 or engine.num_in_flight == 1, (
            "after an output, one more step is queued"
        )
    assert [len(step.slots) for step in engine.steps] == [2, 2, 2, 2]


def test_a_request_that_is_about_to_end_does_not_give_way() -> None:
    engine = Engine(make_scheduler(num_blocks=5, block_size=4, prefix_caching=False))
    for handle, (length, count) in enumerate([(8, 3), (8, 3), (3, 1)]):
        engine.scheduler.add(make_request([1 + handle] * length, count, handle=handle))
    engine.run()  # in the second step the first two want a block each, and only one is coming back
    assert [engine.finished[h].num_preemptions for h in range(3)] == [0, 1, 0]


def test_a_preempted_request_runs_again_before_those_that_have_not_run() -> None:
    engine = Engine(
        make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2, prefix_caching=False)
    )
    for handle, (length, count) in enumerate([(8, 12), (8, 12), (8, 12)]):
        engine.scheduler.add(make_request([1 + handle] * length, count, handle=handle))
    engine.run()
    assert engine.finished[1].num_preemptions > 0
    assert list(engine.finished) == [0, 1, 2]


def test_a_preempted_request_does_not_enter_while_its_last_step_is_in_flight() -> None:
    engine = Engine(make_scheduler(policy="priority", num_blocks=8, block_size=4))
    engine.scheduler.add(make_request([1] * 16, 9, handle=0, priority=5))
    engine.launch()
    engine.scheduler.add(make_request([2] * 28, 1, handle=1, priority=0))
    assert not engine.launch(), "the urgent one must wait for the blocks of the other"
    engine.scheduler.abort(0, [1])
    assert not engine.launch()
    engine.run()
    assert engine.tokens[0] == expected_tokens([1] * 16, 9, 0, VOCAB_SIZE)


def test_an_urgent_prompt_leaves_a_token_of_each_step_to_those_that_decode() -> None:
    engine = Engine(make_scheduler(policy="priority", budget=8))
    for handle in range(3):
        engine.scheduler.add(make_request([1 + handle], 40, handle=handle, priority=1))
    engine.turn()
    engine.scheduler.add(make_request([9] * 30, 1, handle=9, priority=0))
    engine.run()
    chunks = [step.num_tokens.tolist() for step in engine.steps if max(step.num_tokens) > 1]
    assert chunks == [[1, 1, 1, 5]] * 6


def test_rows_of_one_token_come_first_also_those_that_enter() -> None:
    engine = Engine(make_scheduler(budget=16), depth=1)
    engine.scheduler.add(make_request([1] * 9, 1, handle=0))
    engine.run()
    engine.scheduler.add(make_request([2] * 7, 2, handle=1))
    engine.scheduler.add(make_request([1] * 9, 2, handle=2, min_tokens=1, stop_token_ids=[7]))
    engine.scheduler.add(make_request([3], 2, handle=3))
    engine.run()
    step = engine.steps[1]
    assert step.num_tokens.tolist() == [1, 1, 7]
    assert step.entering["slot"].tolist() == step.slots.tolist(), (
        "new columns follow the order of rows"
    )
    assert step.entering["num_computed"].tolist() == [8, 0, 0]
    assert step.entering["num_known"].tolist() == [9, 1, 7] and step.entering[
        "num_sent"
    ].tolist() == [1, 1, 7]
    assert step.new_token_ids.tolist() == [1, 3] + [2] * 7
    assert step.entering["num_stop_ids"].tolist() == [1, 0, 0] and step.new_stop_ids.tolist() == [7]
    for handle, prompt in ((1, [2] * 7), (2, [1] * 9), (3, [3])):
        assert engine.tokens[handle] == expected_tokens(prompt, 2, handle, VOCAB_SIZE)


def test_tokens_in_the_cache_are_sent_to_controls_alone() -> None:
    engine = Engine(make_scheduler(num_blocks=64, block_size=4))
    plain = make_request([7] * 20, 1)
    engine.scheduler.add(plain)
    engine.run()
    asking = msgspec.structs.replace(
        plain, handle=1, controls=encode_controls(Controls(repetition_penalty=1.1))
    )
    for again in (msgspec.structs.replace(plain, handle=2), asking):
        engine.scheduler.add(again)
        engine.run()
    assert [
        (
            step.entering["num_computed"].tolist(),
            step.entering["num_sent"].tolist(),
            step.new_token_ids.tolist(),
        )
        for step in engine.steps[1:]
    ] == [([16], [4], [7] * 4), ([16], [20], [7] * 20)]


def test_a_preempted_request_is_sent_again_in_full_and_keeps_its_prompt_length() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, prefix_caching=False))
    for handle in range(2):
        engine.scheduler.add(make_request([5 + handle] * 8, 20, handle=handle))
    engine.run()
    again = [
        step
        for step in engine.steps
        if any(
            k > p
            for k, p in zip(
                step.entering["num_known"].tolist(),
                step.entering["num_prompt"].tolist(),
                strict=True,
            )
        )
    ]
    assert len(again) == engine.finished[1].num_preemptions > 0
    for step in again:
        assert step.entering["num_prompt"].tolist() == [8]
        known = int(step.entering["num_known"][0])
        assert step.new_token_ids.tolist() == ([6] * 8 + engine.tokens[1])[:known]


def test_the_token_in_flight_of_a_preempted_request_is_delivered_before_it_enters_again() -> None:
    engine = Engine(make_scheduler(policy="priority", max_num_seqs=1))
    engine.scheduler.add(make_request([1], 9, handle=0, priority=5))
    engine.launch()
    engine.scheduler.add(make_request([2], 1, handle=1, priority=0))
    engine.launch()  # preempts; its seat is free, its slot and blocks are not
    assert engine.steps[-1].slots.tolist() != engine.steps[0].slots.tolist()
    engine.take()
    assert len(engine.tokens[0]) == 1
    engine.run()
    assert engine.tokens[0] == expected_tokens([1], 9, 0, VOCAB_SIZE)


def test_an_ended_request_keeps_its_slot_until_its_steps_are_back() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.scheduler.add(make_request([1], 50, handle=0))
    engine.launch()
    engine.scheduler.abort(0, [0, 77])
    engine.scheduler.add(make_request([2], 50, handle=1))
    engine.launch()
    assert [step.slots.tolist() for step in engine.steps] == [[0], [1]]
    engine.take()
    assert engine.tokens[0] == [], "what comes after the end is dropped"
    engine.scheduler.abort(0, [1])
    engine.scheduler.add(make_request([3], 1, handle=2))
    engine.launch()
    assert engine.steps[-1].slots.tolist() == [0]
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_cache_much_too_small_slows_down_but_changes_nothing(policy: str) -> None:
    engine = Engine(make_scheduler(policy=policy, num_blocks=10, block_size=2, max_num_seqs=6))
    for handle in range(12):
        engine.scheduler.add(
            make_request([1 + handle % 3] * 4, 12, handle=handle, priority=handle % 3)
        )
    engine.run()
    for handle in range(12):
        assert engine.tokens[handle] == expected_tokens(
            [1 + handle % 3] * 4, 12, handle, VOCAB_SIZE
        )
    assert engine.scheduler.stats()["num_preemptions"] > 0
    assert engine.scheduler.kv.pool.num_used == 0


def test_finding_ones_own_blocks_after_a_preemption_is_not_a_hit() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4))
    for handle in range(2):
        engine.scheduler.add(make_request([5 + handle] * 8, 20, handle=handle))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (16, 0)


def test_a_deadline_is_kept_while_no_further_step_can_be_scheduled() -> None:
    clock = Clock()
    scheduler = make_scheduler(clock=clock)
    scheduler.add(make_request([1], 50, handle=3, deadline=5.0))
    assert scheduler.schedule() and scheduler.schedule()
    clock.now = 6.0
    (outputs,) = scheduler.take_outputs().values()
    assert [(f.handle, f.reason, f.stop_reason) for f in outputs.finished] == [
        (3, FinishReason.ABORT, "deadline")
    ]
    assert scheduler.next_deadline() is None, "the core would not sleep until the steps are back"


def test_a_deadline_of_a_request_that_has_ended_wakes_nobody() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request([1], 2, handle=0, deadline=100.0))
    engine.scheduler.add(make_request([1], 2, handle=1, deadline=200.0))
    engine.scheduler.abort(0, [1])
    assert engine.scheduler.next_deadline() == 100.0
    engine.run()
    assert engine.scheduler.next_deadline() is None


def test_an_empty_prompt_is_refused() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request([], 1))
    engine.run()
    assert engine.finished[0].error == "prompt: is empty"


def test_each_client_is_told_of_its_own_requests_only() -> None:
    scheduler = make_scheduler()
    for client in (0, 1):
        scheduler.add(make_request([1 + client], 1, handle=7, client=client))
    step = scheduler.schedule()
    assert step is not None
    scheduler.take_outputs()
    outputs = scheduler.update(StepOutput(step.step_id, 0, 0, np.array([30, 40], np.int32)))
    assert {client: (box.handles, box.token_ids) for client, box in outputs.items()} == {
        0: (np.int32(7).tobytes(), np.int32(30).tobytes()),
        1: (np.int32(7).tobytes(), np.int32(40).tobytes()),
    }
    assert all([f.handle for f in box.finished] == [7] for box in outputs.values())
