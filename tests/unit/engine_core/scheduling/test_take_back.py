"""Steps in flight that are lost: no token changes, no block leaks, no wrong block is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.model.cache_groups import CacheGroups
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.messages import FinishReason, unpack_ids
from tests.fakes import (
    VOCAB_SIZE,
    Clock,
    Engine,
    make_beam_request,
    make_pooling_request,
    make_request,
    make_runner,
    make_scheduler,
)
from tests.small_grammars import SmallGrammars, small_grammar
from tests.unit.engine_core.groups.test_beams import search_alone

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"budget": 8},
    "small cache": {"num_blocks": 14, "max_num_seqs": 4},
    "speculation": {"speculative": NGRAM},
    "windows": {"groups": CacheGroups(windows=(6,)), "num_blocks": 96},
    "states": {"num_states": 20},
    "no cache": {"prefix_caching": False},
}


def fail_each(engine: Engine, every: int) -> int:
    """Run an engine to its end; each time that `every` steps have come back, the next one fails.

    Return the number of failures.
    """
    failures = 0
    for turn in range(1, 1000):
        while engine.num_in_flight < engine.depth and engine.launch():
            pass
        if engine.num_in_flight and turn % every == 0:
            engine.fail()
            failures += 1
        elif not engine.turn():
            return failures
    raise AssertionError("it never ends")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_requests_give_their_own_tokens(options: dict[str, Any], every: int, depth: int) -> None:
    engine = Engine(make_scheduler(overlap=depth == 2, **options), depth)
    wanted = {}
    for handle in range(9):
        prompt = [*PROMPT[: 4 + handle], handle]
        wanted[handle] = expected_tokens(prompt, 10, handle, VOCAB_SIZE)
        engine.scheduler.add(make_request(prompt, 10, handle=handle))
    assert fail_each(engine, every) > 1
    assert engine.tokens == wanted
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_choices_share_their_prompt_again(options: dict[str, Any], every: int) -> None:
    engine = Engine(make_scheduler(**options))
    request = make_request(PROMPT, 9, n=4)
    engine.scheduler.add(request)
    assert fail_each(engine, every) >= 1
    for choice in range(4):
        seed = request.sampling.for_choice(choice).seed or 0
        assert engine.tokens[choice] == expected_tokens(PROMPT, 9, seed, VOCAB_SIZE)
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("width", [2, 4])
def test_a_search_finds_the_same_beams(width: int, every: int) -> None:
    engine = Engine(make_scheduler(eos=(0,)))
    params = BeamSearchParams(beam_width=width, max_tokens=9)
    engine.scheduler.add(make_beam_request(PROMPT, params))
    assert fail_each(engine, every) >= 1
    found = [unpack_ids(beam.token_ids).tolist() for beam in engine.finished[0].beams]
    assert found == search_alone(PROMPT, params, (0,))


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_grammars_go_on_where_they_were(speculative: dict[str, Any] | None, every: int) -> None:
    clock = Clock()
    grammars = SmallGrammars(clock)
    engine = Engine(
        make_scheduler(eos=(0,), clock=clock, grammars=grammars, speculative=speculative)
    )
    forms = [small_grammar(regex) for regex in ("[a-d]{2,6}x", "(ab|c){1,9}", "[0-9]{30}")]
    for handle, form in enumerate(forms):
        engine.scheduler.add(make_request(PROMPT, 20, handle=handle, grammar=form))
    assert fail_each(engine, every) >= 1
    for handle, form in enumerate(forms):
        assert engine.tokens[handle] == grammars.expected_tokens(form, PROMPT, 20, handle)


def test_each_token_has_its_logprobs_once() -> None:
    engine = Engine(make_scheduler())
    request = make_request(PROMPT, 12, logprobs=2)
    controls = encode_controls(Controls(logprobs=2))
    engine.scheduler.add(msgspec.structs.replace(request, controls=controls))
    fail_each(engine, 3)
    tokens = expected_tokens(PROMPT, 12, 0, VOCAB_SIZE)
    assert engine.tokens[0] == tokens
    assert [ids[0] for _, ids in engine.logprobs[0]] == tokens


def test_a_vector_is_of_the_whole_prompt() -> None:
    found = []
    for every in (5, 1000):
        scheduler = make_scheduler(budget=4, max_num_seqs=4)
        engine = Engine(scheduler, runner=make_runner(scheduler, pooling="mean"))
        engine.scheduler.add(make_pooling_request(PROMPT, "mean"))
        fail_each(engine, every)
        found.append(engine.vectors[0].tolist())
    assert found[0] == found[1]


def abort(engine: Engine) -> None:
    engine.scheduler.abort(0, [0])


def leave_alone(engine: Engine) -> None:
    pass


def another(engine: Engine) -> None:
    """Let a request hit blocks that only the lost step would have written."""
    engine.scheduler.add(make_request([*PROMPT, 1], 5, handle=2))
    engine.launch()


@pytest.mark.parametrize("options", [{}, {"groups": CacheGroups(windows=(6,))}, {"num_states": 9}])
@pytest.mark.parametrize("before", [abort, leave_alone, another])
def test_a_block_that_was_only_promised_serves_no_hit(
    before: Callable[[Engine], None], options: dict[str, Any]
) -> None:
    engine = Engine(make_scheduler(**options))
    engine.scheduler.add(make_request(PROMPT, 5))
    engine.launch()
    before(engine)
    assert engine.scheduler.kv.pool.num_cached > 0
    engine.fail()
    assert engine.scheduler.kv.pool.num_cached == 0
    engine.scheduler.add(make_request([*PROMPT, 1], 5, handle=1))
    engine.run()
    assert engine.tokens[1] == expected_tokens([*PROMPT, 1], 5, 1, VOCAB_SIZE)
    assert engine.scheduler.kv.pool.num_used == 0


def test_blocks_that_were_written_stay_known() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request(PROMPT, 9))
    for _ in range(3):
        engine.turn()
    engine.launch()
    num_computed = sum(step.num_tokens.sum() for step in engine.steps)
    engine.fail()
    assert engine.scheduler.kv.pool.num_cached >= len(PROMPT) // 4
    engine.launch()
    assert engine.steps[-1].num_tokens.sum() < len(PROMPT) < num_computed
    engine.run()
    assert engine.tokens[0] == expected_tokens(PROMPT, 9, 0, VOCAB_SIZE)


def test_the_order_of_requests_stays() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    engine = Engine(scheduler)
    for handle in range(5):
        scheduler.add(make_request([handle + 1] * 5, 6, handle=handle))
    engine.turn()
    running = [request.handle for request in scheduler._roster.running]
    engine.launch()
    engine.fail()
    engine.launch()
    assert [request.handle for request in scheduler._roster.running] == running == [0, 1]
    engine.run()
    assert list(engine.finished) == [0, 1, 2, 3, 4]


def test_steps_are_smaller_for_a_minute_after_a_want_of_memory() -> None:
    clock = Clock()
    engine = Engine(make_scheduler(clock=clock, budget=40, max_num_seqs=8, num_blocks=200))
    engine.scheduler.add(make_request([3] * 300, 4))

    def largest(steps: int) -> int:
        first = len(engine.steps)
        for _ in range(steps):
            engine.launch()
            engine.take()
        return max(int(step.num_tokens.sum()) for step in engine.steps[first:])

    assert largest(2) == 40
    for expected in (20, 10, 8, 8):  # one token for each request that may run is always left
        engine.launch()
        engine.fail("oom")
        assert largest(1) == expected == engine.scheduler.stats()["max_step_tokens"]
    clock.now += 59.9
    assert largest(1) == 8
    clock.now += 0.1
    assert largest(1) == 40 == engine.scheduler.stats()["max_step_tokens"]
    engine.run()
    assert engine.tokens[0] == expected_tokens([3] * 300, 4, 0, VOCAB_SIZE)


def blame(engine: Engine, handle: int) -> None:
    """Let the oldest step fail, because of the row of this request."""
    engine.fail(slot=engine.scheduler._requests[0, handle].slot)


def test_a_request_that_is_named_ends_alone() -> None:
    engine = Engine(make_scheduler())
    for handle in range(3):
        engine.scheduler.add(make_request(PROMPT, 8, handle=handle))
    engine.turn()
    engine.launch()
    blame(engine, 1)
    engine.run()
    assert engine.finished[1].reason is FinishReason.ERROR
    assert "cannot compute this request: PlannedFaultError" in str(engine.finished[1].error)
    for handle in range(3):
        expected = expected_tokens(PROMPT, 8, handle, VOCAB_SIZE)
        assert engine.tokens[handle] == expected[: 1 if handle == 1 else 8]


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_choice_that_is_named_ends_without_the_others(turns: int) -> None:
    engine = Engine(make_scheduler())
    request = make_request(PROMPT, 8, n=3)
    engine.scheduler.add(request)
    for _ in range(turns):
        engine.turn()
    engine.launch()
    blame(engine, 0)
    engine.run()
    assert engine.finished[0].reason is FinishReason.ERROR
    for choice in (1, 2):
        seed = request.sampling.for_choice(choice).seed or 0
        assert engine.tokens[choice] == expected_tokens(PROMPT, 8, seed, VOCAB_SIZE)


def test_a_search_ends_whole_when_one_of_its_beams_is_named() -> None:
    engine = Engine(make_scheduler(eos=(0,)))
    engine.scheduler.add(make_beam_request(PROMPT, BeamSearchParams(beam_width=3, max_tokens=9)))
    engine.turn()
    engine.turn()
    engine.launch()
    engine.fail(slot=engine.scheduler._plans[0].rows[-1].slot)
    assert not engine.turn()
    assert engine.finished[0].reason is FinishReason.ERROR
    assert not engine.scheduler.has_unfinished


def test_a_request_that_has_ended_is_not_ended_again() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request(PROMPT, 8))
    engine.launch()
    slot = engine.scheduler._requests[0, 0].slot
    engine.scheduler.abort(0, [0])
    engine.fail(slot=slot)
    engine.run()
    assert not engine.finished and engine.scheduler.kv.pool.num_used == 0
