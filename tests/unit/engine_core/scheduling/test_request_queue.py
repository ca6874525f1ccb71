"""The order of the queue."""

import pytest

from sidestep.engine_core.requests.request import Request, RequestStatus
from sidestep.engine_core.scheduling.request_queue import QUEUES, RequestQueue
from tests.fakes import make_request


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
    queue = QUEUES["fcfs"]()
    for handle, priority in enumerate((5, 0, 3)):
        queue.add(request(handle, priority=priority))
    assert drain(queue) == [0, 1, 2]


def test_fcfs_puts_preempted_requests_before_those_that_have_not_run() -> None:
    queue = QUEUES["fcfs"]()
    queue.add(request(3))
    for handle in (2, 1):  # the newest is preempted first, so it is put back first
        queue.put_back(request(handle))
    assert drain(queue) == [1, 2, 3]


def test_fcfs_lets_frontends_take_turns_however_much_one_of_them_sends() -> None:
    queue = QUEUES["fcfs"]()
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
    queue = QUEUES["priority"]()
    for handle, (priority, arrival) in enumerate([(1, 0.0), (0, 2.0), (0, 1.0), (0, 2.0)]):
        queue.add(request(handle, priority=priority, arrival=arrival))
    queue.put_back(request(9, priority=2, arrival=0.0))
    assert drain(queue) == [2, 1, 3, 0, 9]


@pytest.mark.parametrize("policy", sorted(QUEUES))
def test_a_request_that_ended_while_it_waited_is_never_served(policy: str) -> None:
    queue = QUEUES[policy]()
    waiting = [request(handle) for handle in range(3)]
    for each in waiting:
        queue.add(each)
    for gone in waiting[::2]:
        gone.status = RequestStatus.FINISHED
        queue.forget(gone)
    assert (
        len(queue) == 1
        and [r.handle for r in queue] == [1]
        and queue.num_tokens == waiting[1].num_prompt
    )
    assert drain(queue) == [1]


@pytest.mark.parametrize("policy", sorted(QUEUES))
def test_who_stands_in_for_another_has_its_place(policy: str) -> None:
    """Cover also equal priorities and times of arrival."""
    queue = QUEUES[policy]()
    waiting = [request(handle) for handle in range(4)]
    for one in waiting:
        queue.add(one)
    queue.forget(waiting[2])
    waiting[2].status = RequestStatus.FINISHED
    queue.replace(waiting[2], request(9))
    assert len(queue) == 4
    assert drain(queue) == [0, 1, 9, 3]


def test_one_that_was_preempted_is_stood_in_for_among_those() -> None:
    queue = QUEUES["fcfs"]()
    first, second = request(1), request(2)
    queue.add(request(3))
    queue.put_back(second)
    queue.put_back(first)
    queue.forget(second)
    second.status = RequestStatus.FINISHED
    queue.replace(second, request(9))
    assert drain(queue) == [1, 9, 3]
