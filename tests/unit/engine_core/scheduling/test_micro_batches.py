"""Requests in a pipeline.

They are spread over the steps in flight, and each goes on as soon as its token has reached the
first stage.
"""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from tests.fakes import VOCAB_SIZE, Engine, make_beam_request, make_request, make_scheduler


def make_engine(num_stages: int, *, overlap: bool = True, **options: Any) -> Engine:
    return Engine(
        make_scheduler(num_stages=num_stages, overlap=overlap, **options),
        num_stages + overlap,
    )


def num_rows(engine: Engine) -> list[int]:
    return [len(step.slots) for step in engine.steps]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_lone_request_leaves_out_the_beats_in_which_its_token_is_on_its_way(
    num_stages: int,
) -> None:
    engine = make_engine(num_stages)
    engine.scheduler.add(make_request([1, 2, 3], 6))
    assert engine.launch() and engine.launch()
    assert not engine.launch(), "a third step would run no sooner for being in flight"
    engine.run()
    assert [step.beat for step in engine.steps] == [num_stages * i for i in range(6)]
    assert [step.step_id for step in engine.steps] == list(range(6))
    assert engine.tokens[0] == expected_tokens([1, 2, 3], 6, 0, VOCAB_SIZE)


@pytest.mark.parametrize(("overlap", "steps"), [(True, 4), (False, 3)])
def test_a_stop_by_token_costs_one_discarded_token_as_on_a_single_stage(
    overlap: bool, steps: int
) -> None:
    expected = expected_tokens([1, 2, 3], 9, 0, VOCAB_SIZE)
    engine = make_engine(3, overlap=overlap)
    engine.scheduler.add(make_request([1, 2, 3], 9, stop_token_ids=[expected[2]]))
    engine.run()
    assert engine.tokens[0] == expected[:3]
    assert len(engine.steps) == steps


@pytest.mark.parametrize(("num_stages", "count"), [(2, 8), (2, 7), (3, 8), (4, 2)])
def test_requests_that_came_together_part_and_share_the_beats(num_stages: int, count: int) -> None:
    engine = make_engine(num_stages, max_num_seqs=8, num_blocks=200)
    for handle in range(count):
        engine.scheduler.add(make_request([1, 2, 3], 40, handle=handle))
    engine.run()
    first, settled = engine.steps[0], engine.steps[1 + 2 * num_stages : -2 * num_stages]
    assert len(first.slots) == count
    for start in range(len(settled) - num_stages):
        window = settled[start : start + num_stages]
        if window[-1].beat - window[0].beat != num_stages - 1:
            continue  # fewer requests than beats
        sizes = [len(step.slots) for step in window]
        assert sum(sizes) == count and max(sizes) == -(-count // num_stages)
    for handle in range(count):
        assert engine.tokens[handle] == expected_tokens([1, 2, 3], 40, handle, VOCAB_SIZE)


def test_nobody_waits_longer_than_a_round_while_others_end() -> None:
    engine = make_engine(3, max_num_seqs=12, num_blocks=200)
    for handle in range(12):
        engine.scheduler.add(make_request([1, 2, 3], 5 + 7 * (handle % 5), handle=handle))
    engine.run()
    last_beat: dict[int, int] = {}
    gaps = []
    for step in engine.steps:
        for slot in step.slots.tolist():
            if slot in last_beat:
                gaps.append(step.beat - last_beat[slot])
            last_beat[slot] = step.beat
    assert min(gaps) == 3
    assert max(gaps) <= 5, "its own round, and at most another one less a beat"


@pytest.mark.parametrize("overlap", [True, False])
def test_each_stage_has_a_step_and_with_overlap_one_more_is_queued(overlap: bool) -> None:
    engine = make_engine(3, overlap=overlap)
    for handle in range(8):
        engine.scheduler.add(make_request([1, 2, 3], 30, handle=handle))
    for _ in range(5):
        engine.turn()
    while engine.launch():
        pass
    assert engine.num_in_flight == 3 + overlap


def test_chunks_of_a_prompt_follow_each_other_and_are_so_small_that_the_stages_share_it() -> None:
    engine = make_engine(2, num_blocks=1000, budget=4096)
    engine.scheduler.add(make_request(list(range(3000)), 3))
    engine.run()
    chunks = [int(step.num_tokens[0]) for step in engine.steps if step.num_tokens[0] > 1]
    assert sum(chunks) == 3000
    assert max(chunks) <= 3000 // 4
    assert [step.beat for step in engine.steps[: len(chunks)]] == list(range(len(chunks)))
    alone = make_engine(1, num_blocks=1000, budget=4096)
    alone.scheduler.add(make_request(list(range(3000)), 3))
    alone.run()
    assert alone.steps[0].num_tokens.tolist() == [3000]


def test_a_search_keeps_its_seats_while_its_beams_are_in_different_steps() -> None:
    engine = make_engine(2, overlap=False, num_blocks=7, max_num_seqs=3, budget=5)
    engine.scheduler.add(
        make_beam_request([1], BeamSearchParams(beam_width=3, max_tokens=2), handle=0)
    )
    engine.scheduler.add(
        make_beam_request(
            [1, 2, 3, 4, 5, 6, 7, 8, 2], BeamSearchParams(beam_width=2, max_tokens=1), handle=1
        )
    )
    engine.run()  # it checks the invariants
    assert all(len(engine.finished[handle].beams) == width for handle, width in ((0, 3), (1, 2)))
