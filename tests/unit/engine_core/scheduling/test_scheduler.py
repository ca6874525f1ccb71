"""The scheduler as its users notice it: order, limits, sharing, and the cost of a stop."""

import pytest

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.sampling_params import RepetitionDetectionParams
from sidestep.ipc.transport.messages import FinishReason
from tests.fakes import VOCAB_SIZE, Clock, Engine, make_request, make_scheduler


def rows(engine: Engine) -> list[list[int]]:
    """Return the tokens computed for each row of each step."""
    return [step.num_tokens.tolist() for step in engine.steps]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_by_length_costs_no_extra_step(depth: int) -> None:
    engine = Engine(make_scheduler(overlap=depth == 2), depth)
    engine.scheduler.add(make_request([1, 2, 3], 5))
    engine.run()
    assert rows(engine) == [[3], [1], [1], [1], [1]]
    assert engine.tokens[0] == expected_tokens([1, 2, 3], 5, 0, VOCAB_SIZE)
    assert engine.finished[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize(("depth", "steps"), [(1, 3), (2, 4)])
def test_a_stop_by_token_costs_one_discarded_token_with_overlap_and_none_without(
    depth: int, steps: int
) -> None:
    expected = expected_tokens([1, 2, 3], 9, 0, VOCAB_SIZE)
    engine = Engine(make_scheduler(overlap=depth == 2), depth)
    engine.scheduler.add(make_request([1, 2, 3], 9, stop_token_ids=[expected[2]]))
    engine.run()
    assert engine.tokens[0] == expected[:3]
    assert (engine.finished[0].reason, engine.finished[0].stop_reason) == (
        FinishReason.STOP,
        expected[2],
    )
    assert len(engine.steps) == steps


def test_end_of_sequence_stops_without_a_stop_reason_unless_it_is_ignored() -> None:
    expected = expected_tokens([1, 2, 3], 4, 0, VOCAB_SIZE)
    engine = Engine(make_scheduler(eos=(expected[1],)))
    engine.scheduler.add(make_request([1, 2, 3], 4))
    engine.scheduler.add(make_request([1, 2, 3], 4, handle=9, ignore_eos=True))
    engine.run()
    assert (engine.finished[0].reason, engine.finished[0].stop_reason) == (FinishReason.STOP, None)
    assert engine.tokens[0] == expected[:2] and len(engine.tokens[9]) == 4


def test_stop_tokens_before_min_tokens_do_not_stop_and_the_worker_is_told_to_mask_them() -> None:
    expected = expected_tokens([1, 2, 3], 6, 0, VOCAB_SIZE)
    engine = Engine(make_scheduler(eos=(expected[1],)))
    engine.scheduler.add(make_request([1, 2, 3], 6, min_tokens=4, stop_token_ids=[expected[0]]))
    engine.run()
    assert len(engine.tokens[0]) >= 4
    assert engine.steps[0].entering["min_tokens"].tolist() == [4]
    assert engine.steps[0].new_stop_ids.tolist() == sorted({expected[0], expected[1]})


@pytest.mark.parametrize("depth", [1, 2])
def test_an_output_that_goes_round_in_circles_ends_with_a_reason(depth: int) -> None:
    engine = Engine(make_scheduler(overlap=depth == 2), depth)
    engine.runner._vocab_size = 3  # so that tokens repeat at all
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=3)
    engine.scheduler.add(make_request([1, 2, 3], 500, repetition_detection=detection, min_tokens=5))
    engine.run()
    output = engine.tokens[0]
    assert engine.finished[0].reason is FinishReason.REPETITION
    ends = [
        n
        for n in range(5, len(output) + 1)
        if any(output[n - 3 * k : n] == output[n - k : n] * 3 for k in (1, 2, 3))
    ]
    assert ends == [len(output)]


def test_those_that_decode_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    engine = Engine(make_scheduler(budget=10), depth=1)
    engine.scheduler.add(make_request([1] * 5, 20, handle=0))
    engine.turn()
    engine.scheduler.add(make_request([2] * 25, 3, handle=1))
    for _ in range(3):
        engine.turn()
    assert rows(engine) == [[5], [1, 9], [1, 9], [1, 7]]


def test_a_long_prompt_never_starves_those_that_decode() -> None:
    engine = Engine(make_scheduler(budget=8, num_blocks=200))
    for handle in range(4):
        engine.scheduler.add(make_request([1 + handle], 60, handle=handle))
    engine.turn()
    engine.scheduler.add(make_request([9] * 100, 2, handle=9))
    engine.run()
    chunks = [step.num_tokens.tolist() for step in engine.steps if max(step.num_tokens) > 1]
    assert chunks == [[1, 1, 1, 1, 4]] * 25


def test_more_requests_than_seats_wait_in_order() -> None:
    engine = Engine(make_scheduler(max_num_seqs=2))
    for handle in range(5):
        engine.scheduler.add(make_request([1 + handle], 4, handle=handle))
    engine.run()
    assert list(engine.started) == [0, 1, 2, 3, 4]
    assert max(len(step.slots) for step in engine.steps) == 2


def test_a_repeated_prefix_is_not_computed_again() -> None:
    engine = Engine(make_scheduler(block_size=4))
    engine.scheduler.add(make_request(list(range(1, 18)), 1, handle=0))
    engine.run()
    engine.scheduler.add(make_request(list(range(1, 18)), 1, handle=1))
    engine.run()
    assert rows(engine) == [[17], [1]]
    assert engine.started[1].num_cached_tokens == 16


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    engine = Engine(make_scheduler(block_size=4))
    for handle in range(2):
        engine.scheduler.add(make_request(list(range(1, 17)), 1, handle=handle))
        engine.run()
    assert rows(engine)[1] == [4]


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat() -> None:
    engine = Engine(make_scheduler(block_size=4))
    engine.scheduler.add(make_request([1, 2, 3, 4], 9, handle=0))
    engine.run()
    history = [1, 2, 3, 4, *engine.tokens[0], 7]
    engine.scheduler.add(make_request(history, 1, handle=1))
    engine.run()
    assert engine.started[1].num_cached_tokens == 12


def test_equal_prompts_in_one_step_share_blocks() -> None:
    engine = Engine(make_scheduler(block_size=4, budget=64), depth=1)
    for handle in range(4):
        engine.scheduler.add(make_request(list(range(1, 13)), 2, handle=handle))
    engine.launch()
    assert engine.scheduler.kv.pool.num_used == 2 + 4, (
        "two full blocks once, the last one four times"
    )
    engine.run()


def test_salts_do_not_share() -> None:
    engine = Engine(make_scheduler(block_size=4))
    for handle, salt in enumerate(["a", "b", "a"]):
        engine.scheduler.add(make_request(list(range(1, 18)), 1, handle=handle, cache_salt=salt))
        engine.run()
    assert [engine.started[h].num_cached_tokens for h in range(3)] == [0, 0, 16]


def test_abort_frees_blocks_only_when_the_steps_in_flight_are_back() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request([1] * 9, 50))
    engine.launch()
    engine.launch()
    engine.scheduler.abort(0, [0])
    assert engine.scheduler.kv.pool.num_used > 0
    engine.take()
    assert engine.scheduler.kv.pool.num_used > 0
    engine.take()
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.finished == {}, "the one who aborts is not told"


def test_aborting_one_client_leaves_the_others() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request([1], 5, handle=0, client=0))
    engine.scheduler.add(make_request([2], 5, handle=1, client=1))
    engine.scheduler.abort_client(0)
    engine.run()
    assert list(engine.finished) == [1]


def test_the_newest_gives_way_first_and_gives_the_same_tokens_in_the_end() -> None:
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, prefix_caching=False))
    for handle in range(3):
        engine.scheduler.add(make_request([5 + handle] * 6, 14, handle=handle, arrival=handle))
    engine.run()
    for handle in range(3):
        assert engine.tokens[handle] == expected_tokens([5 + handle] * 6, 14, handle, VOCAB_SIZE)
    assert engine.finished[0].num_preemptions == 0
    assert engine.finished[2].num_preemptions > 0


def test_an_urgent_request_takes_the_seat_of_the_least_urgent() -> None:
    engine = Engine(make_scheduler(policy="priority", max_num_seqs=2))
    engine.scheduler.add(make_request([1], 30, handle=0, priority=5))
    engine.scheduler.add(make_request([2], 30, handle=1, priority=7))
    engine.turn()
    engine.scheduler.add(make_request([3], 5, handle=2, priority=0))
    engine.run()
    assert list(engine.finished) == [2, 0, 1]
    assert [engine.finished[h].num_preemptions for h in range(3)] == [0, 1, 0]


def test_equal_priorities_do_not_preempt_each_other() -> None:
    engine = Engine(make_scheduler(policy="priority", max_num_seqs=1))
    engine.scheduler.add(make_request([1], 9, handle=0, arrival=0))
    engine.turn()
    engine.scheduler.add(make_request([2], 9, handle=1, arrival=1))
    engine.run()
    assert all(f.num_preemptions == 0 for f in engine.finished.values())


def test_what_can_never_fit_is_refused_in_words() -> None:
    engine = Engine(make_scheduler(num_blocks=4, block_size=4))
    engine.scheduler.add(make_request([1] * 16, 1))
    engine.turn()
    assert engine.finished[0].reason is FinishReason.ERROR
    assert (
        engine.finished[0].error
        == "prompt: 16 tokens and one of output are more than the 16 that fit"
    )


def test_output_ends_by_length_where_the_model_or_the_cache_ends() -> None:
    engine = Engine(make_scheduler(num_blocks=4, block_size=4))
    engine.scheduler.add(make_request([1] * 10, 100))
    engine.run()
    assert len(engine.tokens[0]) == 6 and engine.finished[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize("running", [True, False])
def test_a_deadline_ends_a_request_that_runs_or_waits(running: bool) -> None:
    clock = Clock()
    engine = Engine(make_scheduler(max_num_seqs=1, clock=clock))
    engine.scheduler.add(make_request([1], 50, handle=0, deadline=5.0 if running else None))
    engine.scheduler.add(make_request([2], 3, handle=1, deadline=None if running else 5.0))
    engine.turn()
    assert engine.scheduler.next_deadline() == 5.0
    clock.now = 5.0
    engine.run()
    late = engine.finished[0 if running else 1]
    assert (late.reason, late.stop_reason) == (FinishReason.ABORT, "deadline")
    assert engine.scheduler.next_deadline() is None


def test_resetting_the_cache_forgets_prefixes_and_harms_no_running_request() -> None:
    engine = Engine(make_scheduler(block_size=4))
    engine.scheduler.add(make_request(list(range(1, 10)), 12, handle=0))
    engine.turn()
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.tokens[0] == expected_tokens(list(range(1, 10)), 12, 0, VOCAB_SIZE)
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.add(make_request(list(range(1, 10)), 1, handle=1))
    engine.run()
    assert engine.started[1].num_cached_tokens == 0


def test_statistics_count_tokens_looked_up_and_found() -> None:
    engine = Engine(make_scheduler(block_size=4))
    for handle in range(2):
        engine.scheduler.add(make_request(list(range(1, 18)), 1, handle=handle))
        engine.run()
    stats = engine.scheduler.stats()
    assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (34, 16)
    assert stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_of_a_chat_finds_what_was_generated_in_the_last(depth: int) -> None:
    engine = Engine(make_scheduler(block_size=4, overlap=depth == 2), depth)
    conversation: list[int] = [1, 2, 3]
    for turn in range(4):
        conversation += [10 + turn] * 5
        engine.scheduler.add(make_request(conversation, 11, handle=turn))
        engine.run()
        known = len(conversation) + len(engine.tokens[turn])
        conversation += engine.tokens[turn]
        if turn < 3:
            # The cache has all full blocks of the turns before; the last token of an answer was
            # never computed.
            engine.scheduler.add(make_request([*conversation, 9], 1, handle=100 + turn))
            engine.run()
            assert engine.started[100 + turn].num_cached_tokens == (known - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_choice_has_generated_is_found_too(depth: int) -> None:
    engine = Engine(make_scheduler(block_size=4, overlap=depth == 2), depth)
    engine.scheduler.add(make_request([1, 2, 3, 4, 5], 10, handle=0, n=3))
    engine.run()
    for handle in range(3):
        engine.scheduler.add(
            make_request([1, 2, 3, 4, 5, *engine.tokens[handle], 9], 1, handle=10 + handle)
        )
        engine.run()
        assert engine.started[10 + handle].num_cached_tokens == 12
