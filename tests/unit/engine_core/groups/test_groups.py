"""Several completions of one prompt.

The tests cover shared blocks, entry, preemption, ends, and outputs.
"""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.transport.messages import AddRequest, FinishReason
from tests.fakes import VOCAB_SIZE, Engine, make_request, make_scheduler

PROMPT = [1 + i % 40 for i in range(1000)]


def expected(message: AddRequest, prompt: list[int], count: int, index: int) -> list[int]:
    """Return the tokens of a lone request with that choice's seed."""
    return expected_tokens(prompt, count, message.sampling.for_choice(index).seed or 0, VOCAB_SIZE)


def check_tokens(engine: Engine, message: AddRequest, prompt: list[int], count: int) -> None:
    for index in range(message.sampling.n):
        handle = message.handle + index
        assert engine.tokens[handle] == expected(message, prompt, count, index)
        assert engine.finished[handle].reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_eight_choices_hold_a_long_prompt_once(depth: int, caching: bool) -> None:
    engine = Engine(
        make_scheduler(
            num_blocks=200, block_size=16, budget=2000, prefix_caching=caching, overlap=depth == 2
        ),
        depth,
    )
    message = make_request(PROMPT, 5, handle=3, n=8, seed=11)
    engine.scheduler.add(message)
    engine.launch()
    # 1,000 tokens are 62 full blocks, and for each choice the one with the other 8 tokens.
    assert engine.scheduler.kv.pool.num_used == 62 + 8
    engine.run()
    check_tokens(engine, message, PROMPT, 5)
    assert [step.num_tokens.tolist() for step in engine.steps] == [
        [1000],
        [1] * 8,
        [1] * 8,
        [1] * 8,
        [1] * 8,
        [1] * 7,
    ]
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 8
    assert [len(step.copy_sources) for step in engine.steps] == [0, 7, 0, 0, 0, 0]


def test_the_first_choice_is_the_plain_request() -> None:
    engine, alone = Engine(make_scheduler()), Engine(make_scheduler())
    engine.scheduler.add(make_request([5, 6, 7], 6, n=3, seed=9))
    alone.scheduler.add(make_request([5, 6, 7], 6, seed=9))
    engine.run()
    alone.run()
    assert engine.tokens[0] == alone.tokens[0]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_end_anywhere_in_a_block(length: int, depth: int) -> None:
    engine = Engine(make_scheduler(block_size=4, overlap=depth == 2), depth)
    message, prompt = make_request(PROMPT[:length], 7, n=4), PROMPT[:length]
    engine.scheduler.add(message)
    engine.run()
    check_tokens(engine, message, prompt, 7)
    assert engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_in_chunks_and_plain_neighbours(depth: int) -> None:
    engine = Engine(make_scheduler(budget=9, overlap=depth == 2), depth)
    plain = make_request([9, 9, 9], 12, handle=50)
    message = make_request(PROMPT[:30], 6, handle=10, n=4)
    engine.scheduler.add(plain)
    engine.turn()
    engine.scheduler.add(message)
    engine.run()
    check_tokens(engine, message, PROMPT[:30], 6)
    assert engine.tokens[50] == expected_tokens([9, 9, 9], 12, 50, VOCAB_SIZE)


def test_choices_that_end_with_the_first_token() -> None:
    for depth in (1, 2):
        engine = Engine(make_scheduler(overlap=depth == 2), depth)
        message = make_request(PROMPT[:6], 1, n=5)
        engine.scheduler.add(message)
        engine.run()
        check_tokens(engine, message, PROMPT[:6], 1)


def test_the_second_call_finds_the_prompt_in_the_cache() -> None:
    engine = Engine(make_scheduler(num_blocks=40, block_size=4))
    for handle in (0, 10):
        engine.scheduler.add(make_request(PROMPT[:21], 4, handle=handle, n=3))
        engine.run()
    assert [engine.started[handle].num_cached_tokens for handle in (0, 1, 2, 10, 11, 12)] == [
        0,
        0,
        0,
        20,
        20,
        20,
    ]
    assert engine.scheduler.kv.num_queried_tokens == 42, (
        "the prompt is looked up once for all choices"
    )


def test_a_group_enters_whole_or_waits() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4))
    engine.scheduler.add(make_request([1, 2], 8, handle=0))
    engine.turn()
    engine.scheduler.add(make_request([3, 4], 3, handle=10, n=4))
    engine.turn()
    assert 10 not in engine.started
    (record,) = [r for r in engine.scheduler.request_records() if r.request_id == "request 10/2"]
    assert record.waiting_for == "max_num_seqs" and engine.scheduler.stats()["num_waiting"] == 4
    engine.run()
    assert {10, 11, 12, 13} <= engine.finished.keys()


@pytest.mark.parametrize(
    ("n", "options", "problem"),
    [
        (5, {"max_num_seqs": 4}, "n: 5 are more than the 4 that run at once (max_num_seqs)"),
        (
            4,
            {"num_blocks": 8, "block_size": 4},
            "n: 4 continuations of 20 tokens do not fit in the KV cache together",
        ),
    ],
)
def test_a_group_that_can_never_run_is_refused(
    n: int, options: dict[str, Any], problem: str
) -> None:
    engine = Engine(make_scheduler(**options))
    engine.scheduler.add(make_request(PROMPT[:20], 4, n=n))
    engine.run()
    assert [engine.finished[i].error for i in range(n)] == [problem] * n


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_group_comes_back_as_one(depth: int, caching: bool) -> None:
    engine = Engine(
        make_scheduler(num_blocks=20, block_size=4, prefix_caching=caching, overlap=depth == 2),
        depth,
    )
    first = make_request(PROMPT[:10], 40, handle=0)
    message = make_request(PROMPT[:14], 16, handle=10, n=3)
    engine.scheduler.add(first)
    engine.scheduler.add(message)
    engine.run()
    check_tokens(engine, message, PROMPT[:14], 16)
    assert engine.tokens[0] == expected_tokens(PROMPT[:10], 40, 0, VOCAB_SIZE)
    preemptions = {engine.finished[handle].num_preemptions for handle in (10, 11, 12)}
    assert len(preemptions) == 1 and preemptions != {0}, "all of them gave way, each time"


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_alone_run_to_what_the_cache_holds(depth: int) -> None:
    engine = Engine(make_scheduler(num_blocks=10, block_size=4, overlap=depth == 2), depth)
    message = make_request(PROMPT[:9], 1000, n=3)
    engine.scheduler.add(message)
    engine.run()
    # Two blocks for all, and 8 of 10 for three.
    check_tokens(engine, message, PROMPT[:9], 16 - 9)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(9))
def test_an_abort_at_each_stage_frees_everything(depth: int, turns: int) -> None:
    engine = Engine(make_scheduler(budget=8, overlap=depth == 2), depth)
    engine.scheduler.add(make_request([7, 8], 20, handle=0))
    engine.scheduler.add(make_request(PROMPT[:20], 6, handle=10, n=3))
    for _ in range(turns):
        engine.turn()
    engine.scheduler.abort(0, [10, 11, 12])
    engine.run()
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.tokens[0] == expected_tokens([7, 8], 20, 0, VOCAB_SIZE)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("ended", [10, 11])
def test_one_choice_ends_and_the_others_go_on(depth: int, turns: int, ended: int) -> None:
    engine = Engine(make_scheduler(budget=8, overlap=depth == 2), depth)
    engine.scheduler.add(make_request([7, 8], 20, handle=0))
    message = make_request(PROMPT[:20], 6, handle=10, n=3)
    engine.scheduler.add(message)
    for _ in range(turns):
        engine.turn()
    engine.scheduler.abort(0, [ended])
    engine.run()
    for index in range(3):
        if 10 + index != ended:
            assert engine.tokens[10 + index] == expected(message, PROMPT[:20], 6, index)


def test_a_more_urgent_group_takes_the_place_of_a_less_urgent_one() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4, policy="priority"))
    slow, urgent = (
        make_request(PROMPT[:9], 30, handle=0, n=3, priority=5),
        make_request(PROMPT[3:9], 4, handle=10, n=4, priority=1),
    )
    engine.scheduler.add(slow)
    for _ in range(4):
        engine.turn()
    engine.scheduler.add(urgent)
    engine.run()
    check_tokens(engine, slow, PROMPT[:9], 30)
    check_tokens(engine, urgent, PROMPT[3:9], 4)
    assert [engine.finished[handle].num_preemptions for handle in (0, 1, 2, 10)] == [1, 1, 1, 0]


def test_what_is_told_of_a_prompt_is_computed_once() -> None:
    """Let the first choice alone compute the prompt's logprobs.

    It takes nothing from the cache for that. They are not computed again after a preemption.
    """
    engine = Engine(
        make_scheduler(
            num_blocks=200, block_size=16, budget=2000, policy="priority", max_num_seqs=3
        )
    )
    for round_ in range(2):
        message = make_request(PROMPT, 5, handle=10 * round_, n=3, prompt_logprobs=0, priority=5)
        engine.scheduler.add(message)
        engine.turn()
        engine.turn()
        if round_:
            engine.scheduler.add(make_request([1], 1, handle=99, priority=1))
        engine.run()
        check_tokens(engine, message, PROMPT, 5)
    assert engine.finished[10].num_preemptions == 1
    chunks = [max(step.num_tokens) for step in engine.steps if max(step.num_tokens) > 1]
    assert chunks[:2] == [1000, 1000] and max(chunks[2:]) < 16, "full blocks are found again"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_abort_of_the_first_choice_does_not_bring_the_others_forward(policy: str) -> None:
    """Check that the other choices keep their queue positions, behind earlier requests."""
    engine = Engine(make_scheduler(max_num_seqs=2, policy=policy))
    engine.scheduler.add(make_request([1], 4, handle=0, n=2))
    engine.turn()
    for handle, n in ((10, 1), (20, 2), (30, 1)):
        engine.scheduler.add(make_request([2, handle], 4, handle=handle, n=n))
    engine.scheduler.abort(0, [20])
    engine.run()
    assert [handle for handle in engine.started if handle >= 10] == [10, 21, 30]
