"""Beam search in the scheduler.

Its result does not depend on the requests beside it, and it holds no more blocks than it needs.
tests/e2e/output/test_beam_search.py compares its rules with those of transformers, with real
models.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from sidestep.engine_core.groups.beam_search import BeamSearch
from sidestep.engine_core.groups.beams import BeamGroup
from sidestep.engine_core.requests.candidates import Candidates
from sidestep.executor.runner.fake import candidates, expected_tokens
from sidestep.executor.runner.fake_parts import chain
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.transport.messages import FinishReason, unpack_ids
from tests.fakes import VOCAB_SIZE, Clock, Engine, make_beam_request, make_request, make_scheduler

PROMPT = [1 + i % 40 for i in range(1000)]
EOS = (0,)


def search_alone(
    prompt: list[int],
    params: BeamSearchParams,
    eos: tuple[int, ...] = (),
    max_tokens: int | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> list[list[int]]:
    """Return the search's result when each beam is a plain list of tokens.

    Each beam is computed from its beginning.
    """
    ends = frozenset() if params.ignore_eos else frozenset(eos)
    search, beams = BeamSearch(params, ends, max_tokens or params.max_tokens), [list[int]()]
    states = [functools.reduce(chain, prompt, 0)]
    while True:
        given = []
        for state in states:
            rated = candidates(state, params.num_candidates(len(ends)), vocab_size)
            given.append(
                Candidates(
                    np.array([t for _, t in rated], np.int32),
                    np.array([s for s, _ in rated], np.float32),
                )
            )
        chosen = search.advance(given, beams)
        if not chosen:
            return [ended.token_ids for ended in search.ended]
        beams = [[*beams[choice.parent], choice.token] for choice in chosen]
        states = [chain(states[choice.parent], choice.token) for choice in chosen]


def found(engine: Engine, handle: int = 0) -> list[list[int]]:
    return [unpack_ids(beam.token_ids).tolist() for beam in engine.finished[handle].beams]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_a_search_finds_what_it_finds_without_a_cache(
    depth: int, width: int, length: int, caching: bool
) -> None:
    engine = Engine(
        make_scheduler(block_size=4, eos=EOS, prefix_caching=caching, overlap=depth == 2), depth
    )
    params = BeamSearchParams(beam_width=width, max_tokens=14)
    engine.scheduler.add(make_beam_request(PROMPT[:length], params))
    engine.run()
    assert found(engine) == search_alone(PROMPT[:length], params, EOS)
    assert engine.scheduler.kv.pool.num_used == 0
    assert not engine.tokens[0], "what a beam would have sampled is nobody's business"


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
def test_every_way_to_stop(early_stopping: Any, penalty: float) -> None:
    engine = Engine(make_scheduler(eos=(0, 3, 7, 11), max_num_seqs=8))
    params = BeamSearchParams(
        beam_width=3, max_tokens=20, early_stopping=early_stopping, length_penalty=penalty
    )
    engine.scheduler.add(make_beam_request(PROMPT[:6], params))
    engine.run()
    assert found(engine) == search_alone(PROMPT[:6], params, (0, 3, 7, 11))
    scores = [beam.score for beam in engine.finished[0].beams]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_beams_share_the_prompt_and_what_they_have_in_common(depth: int) -> None:
    engine = Engine(
        make_scheduler(num_blocks=200, block_size=16, budget=2000, overlap=depth == 2), depth
    )
    engine.scheduler.add(make_beam_request(PROMPT, BeamSearchParams(beam_width=6, max_tokens=40)))
    most = 0
    while engine.turn():
        most = max(most, engine.scheduler.kv.pool.num_used)
    # 62 full blocks of the prompt; its last 8 tokens and 40 more are in 3 blocks of each beam.
    assert most <= 62 + 6 * 3
    assert found(engine) == search_alone(PROMPT, BeamSearchParams(beam_width=6, max_tokens=40))
    assert all(len(step.slots) == 6 for step in engine.steps[1:]), (
        "one row for each beam, once the prompt is there"
    )


def test_a_beam_that_forks_brings_its_new_token_alone() -> None:
    engine = Engine(make_scheduler(num_blocks=200, block_size=16, budget=2000))
    engine.scheduler.add(make_beam_request(PROMPT, BeamSearchParams(beam_width=4, max_tokens=12)))
    engine.run()
    first, *forks = (step.entering["num_sent"].tolist() for step in engine.steps)
    assert first == [1000] and max(map(len, forks)) > 1
    assert {count for counts in forks for count in counts} == {1}


@pytest.mark.parametrize("depth", [1, 2])
def test_plain_neighbours_go_on_and_do_not_change(depth: int) -> None:
    engine = Engine(make_scheduler(overlap=depth == 2, eos=EOS), depth)
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    engine.scheduler.add(make_request([5, 6, 7], 30, handle=10, ignore_eos=True))
    engine.scheduler.add(make_beam_request(PROMPT[:9], params, handle=0))
    engine.scheduler.add(make_request(PROMPT[:9], 12, handle=20, n=2, ignore_eos=True))
    engine.run()
    assert engine.tokens[10] == expected_tokens([5, 6, 7], 30, 10, VOCAB_SIZE)
    assert engine.tokens[20] == expected_tokens(PROMPT[:9], 12, 20, VOCAB_SIZE)
    assert found(engine) == search_alone(PROMPT[:9], params, EOS)
    slot = 0  # of the request that entered first
    assert all(slot in step.slots for step in engine.steps[:30]), "it never waited for the beams"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [21, 22, 23, 24])
def test_preempted_searches_find_the_same(depth: int, caching: bool, num_blocks: int) -> None:
    engine = Engine(
        make_scheduler(
            num_blocks=num_blocks,
            block_size=4,
            prefix_caching=caching,
            eos=EOS,
            overlap=depth == 2,
            budget=10,
        ),
        depth,
    )
    params = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    first = make_request(PROMPT[:10], 40, handle=10, ignore_eos=True)
    engine.scheduler.add(first)
    for handle in (0, 1):
        engine.scheduler.add(make_beam_request(PROMPT[handle:14], params, handle=handle))
    engine.run()
    for handle in (0, 1):
        assert found(engine, handle) == search_alone(PROMPT[handle:14], params, EOS)
    assert engine.tokens[10] == expected_tokens(PROMPT[:10], 40, 10, VOCAB_SIZE)
    assert engine.scheduler.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_what_beams_have_computed_is_found_by_its_content(depth: int) -> None:
    engine = Engine(make_scheduler(num_blocks=200, block_size=2, overlap=depth == 2), depth)
    for start in range(6):
        prompt = PROMPT[start : start + 5]
        engine.scheduler.add(
            make_beam_request(prompt, BeamSearchParams(beam_width=4, max_tokens=20), handle=start)
        )
        engine.run()
        for i, tokens in enumerate(found(engine, start)):
            handle = 100 + 10 * start + i
            engine.scheduler.add(make_request([*prompt, *tokens, 9], 5, handle=handle))
            engine.run()
            assert engine.tokens[handle] == expected_tokens(
                [*prompt, *tokens, 9], 5, handle, VOCAB_SIZE
            )
            # The best one's last token has not been computed, and the others share at least the
            # prompt.
            assert engine.started[handle].num_cached_tokens >= 4
        assert engine.started[100 + 10 * start].num_cached_tokens == 24


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(12))
def test_an_abort_at_each_stage_frees_everything(depth: int, turns: int) -> None:
    engine = Engine(make_scheduler(budget=8, overlap=depth == 2), depth)
    engine.scheduler.add(
        make_beam_request(PROMPT[:20], BeamSearchParams(beam_width=3, max_tokens=9), handle=0)
    )
    for _ in range(turns):
        engine.turn()
    engine.scheduler.abort(0, [0])
    engine.run()
    assert engine.scheduler.kv.pool.num_used == 0 and not engine.scheduler.has_unfinished


def test_what_had_come_of_a_beam_before_it_was_preempted_is_waited_for_again() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(
        make_beam_request(PROMPT[:5], BeamSearchParams(beam_width=2, max_tokens=9))
    )
    group = engine.scheduler._requests[0, 0].group
    assert isinstance(group, BeamGroup)
    while len(group.beams) < 2:
        engine.turn()
    first, second = group.beams
    some = Candidates(np.arange(1, 7, dtype=np.int32), -np.arange(1, 7, dtype=np.float32))
    assert group.take(second, some) is None
    group.enter([first, second])
    assert group.take(first, some) is None, "the second has not come again"
    assert group.take(second, some) is not None
    group.stop_forking()


def test_a_deadline_gives_what_there_is() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock))
    engine.scheduler.add(
        make_beam_request(PROMPT[:5], BeamSearchParams(beam_width=3, max_tokens=50), deadline=5.0)
    )
    for _ in range(6):
        engine.turn()
    clock.now = 6.0
    engine.run()
    assert (
        engine.finished[0].reason is FinishReason.ABORT
        and engine.finished[0].stop_reason == "deadline"
    )
    assert len({len(tokens) for tokens in found(engine)}) == 1 and len(found(engine)) == 3


def test_a_search_that_can_never_run_is_refused() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4))
    engine.scheduler.add(make_beam_request([1], BeamSearchParams(beam_width=5)))
    engine.run()
    assert (
        engine.finished[0].error
        == "beam_width: 5 are more than the 4 that run at once (max_num_seqs)"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("beam_width", True),
        ("max_tokens", 0),
        ("length_penalty", "1"),
        ("length_penalty", float("nan")),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("temperature", 0.7),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
    ],
)
def test_wrong_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        BeamSearchParams(**{"beam_width": 2, field: value})
