"""States of recurrent layers: requests own one each, and prefixes are found by checkpoints.

The fake device checks that each row begins from the state of its own tokens.
tests/property/test_scheduler_machine.py runs the scheduler with states under random load.
"""

from __future__ import annotations

from sidestep.engine_core.kv_cache.state_cache import StateCache
from sidestep.executor.runner.fake import expected_tokens
from tests.fakes import VOCAB_SIZE, Engine, make_request, make_scheduler

SYSTEM = [1 + i % 40 for i in range(22)]


def serve(engine: Engine, handle: int, prompt: list[int]) -> int:
    """Run a request alone, check its tokens, and return how many tokens it has found cached."""
    engine.scheduler.add(make_request(prompt, 6, handle=handle))
    engine.run()
    assert engine.tokens[handle] == expected_tokens(prompt, 6, handle, VOCAB_SIZE)
    return engine.started[handle].num_cached_tokens


def test_a_prompt_is_found_up_to_its_last_full_block() -> None:
    engine = Engine(make_scheduler(num_states=12))
    assert serve(engine, 0, SYSTEM) == 0
    assert serve(engine, 1, SYSTEM) == 20
    assert serve(engine, 2, [*SYSTEM, *engine.tokens[0], 7]) == 20, "the next turn of a chat"
    assert engine.scheduler.kv.states is not None
    assert engine.scheduler.kv.states.num_free == 12


def test_a_common_beginning_is_found_once_two_prompts_have_differed_behind_it() -> None:
    engine = Engine(make_scheduler(num_states=12, budget=16))
    first, second, third = ([*SYSTEM, *[45 + i] * 20] for i in range(3))
    assert serve(engine, 0, first) == 0
    assert serve(engine, 1, second) == 0, "the first had no reason to save a state there"
    assert serve(engine, 2, third) == 20, "the second had"


def test_without_room_for_checkpoints_every_request_still_runs() -> None:
    engine = Engine(make_scheduler(num_states=9, max_num_seqs=8))
    for handle in range(20):
        engine.scheduler.add(make_request([*SYSTEM, handle + 1], 9, handle=handle))
    engine.run()
    for handle in range(20):
        expected = expected_tokens([*SYSTEM, handle + 1], 9, handle, VOCAB_SIZE)
        assert engine.tokens[handle] == expected
    assert engine.scheduler.kv.states is not None
    assert engine.scheduler.kv.states.num_free == 9


def test_choices_begin_from_the_state_before_the_last_token_of_the_prompt() -> None:
    for length in (1, 2, 16, 17, 18, 33):
        engine, prompt = Engine(make_scheduler(num_states=12, budget=16)), SYSTEM * 2
        request = make_request(prompt[:length], 5, n=3)
        engine.scheduler.add(request)
        engine.run()
        for index in range(3):
            seed = request.sampling.for_choice(index).seed or 0
            expected = expected_tokens(prompt[:length], 5, seed, VOCAB_SIZE)
            assert engine.tokens[index] == expected


def test_reset_forgets_checkpoints() -> None:
    engine = Engine(make_scheduler(num_states=12))
    serve(engine, 0, SYSTEM)
    engine.scheduler.reset_prefix_cache()
    assert serve(engine, 1, SYSTEM) == 0


def test_a_copy_for_a_request_that_leaves_holds_no_state() -> None:
    """Nothing can be scheduled where a step to come holds all states."""
    states = StateCache(2)
    source, target = states.enter(None), states.enter(None)
    states.copy(source, target)
    states.free(source)
    assert states.num_free == 0, "the copy may still be made"
    states.free(target)
    assert states.num_free == 2 and states.take_copies() == []
    states.check_invariants([])
