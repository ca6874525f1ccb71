"""The bounds on the time of masks: for a step, a request and a grammar."""

from __future__ import annotations

import pytest

from sidestep.engine_core.requests import mask_account
from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.mask_account import TOKEN_S, MaskAccount
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.structured_outputs.grammar_costs import share_masks
from sidestep.ipc.transport.messages import FinishReason
from tests.fakes import Clock, Engine, make_request, make_scheduler
from tests.small_grammars import SmallGrammars, small_grammar


def unheld() -> Request:
    return Request.from_message(make_request([1]), 100, frozenset())


def held(seconds: float) -> Request:
    request = unheld()
    request.restrict(GrammarState("", mask_s=seconds))
    return request


def test_nobody_is_left_out_while_the_masks_fit() -> None:
    assert not share_masks([held(0.004) for _ in range(4)], 0.02)
    assert not share_masks([unheld() for _ in range(3)], 0.0)


def test_cheap_masks_come_first_and_dear_ones_take_turns() -> None:
    cheap, dear, plain = [held(1e-5) for _ in range(50)], [held(0.03) for _ in range(4)], unheld()
    served = list[Request]()
    for _ in range(8):
        out = share_masks([*dear, *cheap, plain], 0.02)
        assert len(out) == 3 and set(out) < set(dear)
        served += set(dear) - set(out)
    assert all(2 <= served.count(request) <= 2 for request in dear)


def test_as_many_as_fit_have_their_rows() -> None:
    requests = [held(0.003) for _ in range(128)]
    assert 128 - len(share_masks(requests, 0.03)) in (10, 11)


def test_an_account_is_about_what_is_beyond_the_average() -> None:
    clock = Clock()
    account = MaskAccount("the request", 1.0, clock)
    for _ in range(10_000):
        account.charge(TOKEN_S)
    for _ in range(9):
        account.charge(0.1 + TOKEN_S)
    assert account.problem() is None
    for _ in range(2):
        account.charge(0.1 + TOKEN_S)
    problem = account.problem()
    assert problem is not None and "too expensive" in problem and "the request" in problem
    clock.now += 60
    assert account.problem() is None, "time brings it back"


def test_what_is_too_expensive_ends_with_an_error_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End the request first, then refuse its grammar.

    The grammar is over its bound as well then, so the next request with it is refused.
    """
    monkeypatch.setattr(mask_account, "TOKEN_S", 0.0)
    monkeypatch.setattr("sidestep.engine_core.structured_outputs.grammars.REQUEST_S", 0.05)
    monkeypatch.setattr("sidestep.engine_core.structured_outputs.grammars.GRAMMAR_S", 0.1)
    clock = Clock()
    grammars = SmallGrammars(clock)
    grammars.mask_seconds = (0.006,)
    run = Engine(make_scheduler(grammars=grammars, clock=clock, eos=(0,)))
    dear, other = small_grammar("[0-9]{30}"), small_grammar("[a-d]{2,6}x")
    for handle in range(4):
        run.scheduler.add(make_request([1], 30, handle=handle, grammar=dear))
        run.run()
    run.scheduler.add(make_request([1], 30, handle=8, grammar=other))
    run.scheduler.add(make_request([1], 30, handle=9, ignore_eos=True))
    run.run()
    for handle in range(4):
        finish = run.finished[handle]
        assert finish.reason is FinishReason.ERROR and "too expensive" in (finish.error or "")
        assert finish.field == "structured_outputs.regex"
    assert 5 <= len(run.tokens[0]) <= 10 and not run.tokens[3]
    assert "all requests with this grammar" in (run.finished[3].error or "")
    assert run.finished[8].error is None and len(run.tokens[9]) == 30


def test_choices_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_account, "TOKEN_S", 0.0)
    monkeypatch.setattr("sidestep.engine_core.structured_outputs.grammars.REQUEST_S", 0.05)
    grammars = SmallGrammars(Clock())
    grammars.mask_seconds = (0.004,)
    run = Engine(make_scheduler(grammars=grammars, clock=grammars._clock, eos=(0,)))
    run.scheduler.add(make_request([1], 30, handle=0, n=4, grammar=small_grammar("[0-9]{30}")))
    run.run()
    assert (
        all(finish.reason is FinishReason.ERROR for finish in run.finished.values())
        and len(run.finished) == 4
    )
    assert 8 <= sum(len(run.tokens[handle]) for handle in range(4)) <= 16
