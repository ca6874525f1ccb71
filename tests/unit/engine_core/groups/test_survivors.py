"""The place of a group that waits when its first member is aborted: the others keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sidestep.ipc.common.registry import POLICIES
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.records import RequestRecord
from tests.fakes import Clock, Engine, make_request, make_scheduler
from tests.small_grammars import SmallGrammars, small_grammar

BUDGET = 8


def make_engine(policy: str, **options: Any) -> Engine:
    clock = Clock()
    return Engine(
        make_scheduler(
            policy=policy,
            budget=BUDGET,
            prefix_caching=False,
            clock=clock,
            grammars=SmallGrammars(clock),
            **options,
        )
    )


def add(
    engine: Engine, handle: int, n: int, max_tokens: int = 4, grammar: Grammar | None = None
) -> None:
    """Add a call whose prompt takes the budget of a step, so that one call enters at a time."""
    prompt = [1 + handle] * BUDGET
    engine.scheduler.add(
        make_request(prompt, max_tokens, handle=handle, arrival=handle, n=n, grammar=grammar)
    )


def records(engine: Engine) -> dict[int, RequestRecord]:
    """Return the records of all requests that have not ended, by their handles."""
    found = {}
    for record in engine.scheduler.request_records():
        handle, _, index = record.request_id.removeprefix("request ").partition("/")
        if record.status != "finished":
            found[int(handle) + int(index or 0)] = record
    return found


def admissions(engine: Engine) -> list[set[int]]:
    """Run to the end. Return the waiting requests in the order in which they enter, by steps."""
    waiting = {handle for handle, r in records(engine).items() if r.status != "running"}
    order = list[set[int]]()
    while engine.scheduler.has_unfinished:
        if engine.num_in_flight < engine.depth:
            engine.launch()
        entered = {h for h, r in records(engine).items() if r.status == "running"} & waiting
        if entered:
            order.append(entered)
            waiting -= entered
        if engine.num_in_flight:
            engine.take()
    assert not waiting
    return order


def waiting_calls(policy: str) -> Engine:
    """Return an engine in which calls 10, 20 and 30 wait in the queue."""
    engine = make_engine(policy, max_num_seqs=3)
    add(engine, 0, 3)
    engine.turn()
    for handle in (10, 20, 30):
        add(engine, handle, 3)
    assert {records(engine)[handle].status for handle in (10, 20, 30)} == {"waiting"}
    return engine


def preempted_calls(policy: str) -> Engine:
    """Return an engine in which calls 10 and 20 have been preempted, and call 30 waits."""
    engine = make_engine(policy, max_num_seqs=5, num_blocks=26, block_size=2)
    add(engine, 0, 1, 40)
    add(engine, 10, 2, 16)
    add(engine, 20, 2, 16)
    add(engine, 30, 2)
    while {records(engine)[handle].status for handle in (10, 20)} != {"preempted"}:
        engine.turn()
    assert records(engine)[30].status == "waiting"
    return engine


def calls_without_grammar(policy: str) -> Engine:
    """Return an engine in which calls 10 and 20 wait for a grammar, between two in the queue."""
    engine = make_engine(policy, max_num_seqs=3)
    add(engine, 0, 3)
    engine.turn()
    add(engine, 5, 3)
    for handle, regex in ((10, "[a-d]{2,6}x"), (20, "a?b*c{0,3}")):
        add(engine, handle, 3, grammar=small_grammar(regex))
    add(engine, 30, 3)
    assert {records(engine)[handle].waiting_for for handle in (10, 20)} == {"grammar"}
    return engine


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("start", [waiting_calls, preempted_calls, calls_without_grammar])
@pytest.mark.parametrize("first", [10, 20])
def test_an_abort_of_the_first_member_changes_no_place(
    policy: str, start: Callable[[str], Engine], first: int
) -> None:
    untouched = admissions(start(policy))
    assert len(untouched) >= 3, "they enter one after the other"
    engine = start(policy)
    engine.scheduler.abort(0, [first])
    assert admissions(engine) == [entered - {first} for entered in untouched]
