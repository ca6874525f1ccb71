"""The scheduling policies: each one's own order, and what all of them promise."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.policies.request_queue import RequestQueue
from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.ipc.common.registry import POLICIES, load
from sidestep.ipc.transport.step import StepOutput
from tests.fakes import Engine, make_request, make_scheduler


def make_policy(name: str) -> Policy:
    policy: Policy = load(POLICIES[name])()
    return policy


def make_queue(name: str) -> RequestQueue:
    return make_policy(name).queue


def request(handle: int, *, priority: int = 0, arrival: float = 0.0, client: int = 0) -> Request:
    message = make_request([1], handle=handle, priority=priority, arrival=arrival, client=client)
    return Request.from_message(message, 100, frozenset())


def drain(queue: RequestQueue) -> list[int]:
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().handle)
    assert len(queue) == 0
    return order


def test_fcfs_serves_in_the_order_of_coming_whatever_the_priority() -> None:
    queue = make_queue("fcfs")
    for handle, priority in enumerate((5, 0, 3)):
        queue.add(request(handle, priority=priority))
    assert drain(queue) == [0, 1, 2]


def test_fcfs_puts_preempted_requests_before_those_that_have_not_run() -> None:
    queue = make_queue("fcfs")
    queue.add(request(3))
    for handle in (2, 1):  # the newest is preempted first, so it is put back first
        queue.put_back(request(handle))
    assert drain(queue) == [1, 2, 3]


def test_fcfs_lets_frontends_take_turns_however_much_one_of_them_sends() -> None:
    queue = make_queue("fcfs")
    for handle in range(5):
        queue.add(request(handle, client=1))
    queue.add(request(10, client=2))
    queue.add(request(20, client=3))
    queue.add(request(11, client=2))
    assert drain(queue) == [0, 10, 20, 1, 11, 2, 3, 4]
    queue.add(request(5, client=1))
    queue.add(request(12, client=2))
    queue.put_back(request(9, client=1))
    assert drain(queue) == [9, 5, 12]


def test_priority_serves_the_lowest_number_first_then_the_earliest_arrival() -> None:
    queue = make_queue("priority")
    for handle, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (0, 2.0)]):
        queue.add(request(handle, priority=priority, arrival=arrival))
    queue.put_back(request(9, priority=2, arrival=0.0))
    assert drain(queue) == [2, 1, 3, 0, 9]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_request_that_ended_while_it_waited_is_never_served(policy: str) -> None:
    queue = make_queue(policy)
    waiting = [request(handle) for handle in range(3)]
    for each in waiting:
        queue.add(each)
    for gone in waiting[::2]:
        gone.finish()
        queue.forget(gone)
    assert (
        len(queue) == 1
        and [r.handle for r in queue] == [1]
        and queue.num_tokens == waiting[1].num_prompt
    )
    assert drain(queue) == [1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_stands_in_for_another_has_its_place(policy: str) -> None:
    """Cover also equal priorities and times of arrival."""
    queue = make_queue(policy)
    waiting = [request(handle) for handle in range(4)]
    for one in waiting:
        queue.add(one)
    queue.forget(waiting[2])
    waiting[2].finish()
    queue.replace(waiting[2], request(9))
    assert len(queue) == 4
    assert drain(queue) == [0, 1, 9, 3]


def test_one_that_was_preempted_is_stood_in_for_among_those() -> None:
    queue = make_queue("fcfs")
    first, second = request(1), request(2)
    queue.add(request(3))
    queue.put_back(second)
    queue.put_back(first)
    queue.forget(second)
    second.finish()
    queue.replace(second, request(9))
    assert drain(queue) == [1, 9, 3]


def some_requests(count: int, rng: random.Random, first: int = 0) -> list[Request]:
    return [
        request(
            handle,
            priority=rng.randrange(3),
            arrival=float(rng.randrange(4)),
            client=rng.randrange(3),
        )
        for handle in range(first, first + count)
    ]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_gives_every_request_one_place_and_serves_it_once(name: str) -> None:
    rng = random.Random(7)
    for _ in range(50):
        policy = make_policy(name)
        entered = dict.fromkeys(some_requests(rng.randrange(1, 12), rng))
        running = policy.ranked(entered.copy())
        assert set(running) == set(entered)
        assert list(policy.ranked(running.copy())) == list(running)
        assert list(policy.victims(running)) == list(reversed(running))
        waiting = some_requests(8, rng, 50)
        for one in waiting:
            policy.queue.add(one)
        served = drain(policy.queue)
        assert Counter(served) == Counter(one.handle for one in waiting)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_lets_nobody_come_back_before_the_request_that_preempted_it(name: str) -> None:
    """Two requests could otherwise preempt each other for ever."""
    rng = random.Random(7)
    for _ in range(200):
        policy = make_policy(name)
        running = policy.ranked(dict.fromkeys(some_requests(6, rng)))
        (urgent,) = some_requests(1, rng, 50)
        policy.queue.add(urgent)
        victims = list(policy.victims(running, urgent))
        if victims:
            assert policy.urgent() is urgent, "nobody would ask for them"
        assert victims == list(reversed(running))[: len(victims)], "the least important go first"
        for victim in victims:
            assert urgent not in policy.victims({urgent: None}, victim)
            policy.queue.put_back(victim)
        assert policy.queue.peek() is urgent


@pytest.mark.parametrize("speculative", [None, {"method": "synthetic", "adaptive": False}])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_is_charged_every_token_that_a_step_computes(
    name: str, speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemptions, groups, chunks of prompts and drafts, right or wrong, count too."""
    scheduler = make_scheduler(
        policy=name,
        num_blocks=12,
        block_size=2,
        max_num_seqs=4,
        budget=7 if speculative is None else 20,
        speculative=speculative,
    )
    engine, charged, computed = Engine(scheduler), Counter[int](), Counter[int]()
    num_drafts, take = 0, scheduler._results.take

    def count_drafts(plan: StepPlan, output: StepOutput) -> None:
        nonlocal num_drafts
        for row, drafts in zip(plan.sampling, output.num_drafts.tolist(), strict=False):
            computed[row.slot] += drafts
            num_drafts += drafts
        take(plan, output)

    def charge(rows: Iterable[tuple[Request, int]]) -> None:
        for request, num_tokens in rows:
            charged[request.slot] += num_tokens

    monkeypatch.setattr(scheduler._policy, "charge", charge)
    monkeypatch.setattr(scheduler._results, "take", count_drafts)
    for handle in range(0, 12, 2):
        engine.scheduler.add(
            make_request(
                [1 + handle] * 5, 6, handle=handle, priority=handle % 3, n=1 + (handle == 4)
            )
        )
    while engine.turn():
        pass
    for step in engine.steps:
        for slot, count in zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True):
            computed[slot] += count
    assert charged == computed
    assert scheduler.stats()["num_preemptions"] > 0
    assert (num_drafts > 0) == (speculative is not None)
