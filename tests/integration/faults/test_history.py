"""The check of histories finds each sort of loss."""

from __future__ import annotations

import pytest

from sidestep import CompletionOutput, EngineDeadError, RequestError, RequestOutput
from sidestep.frontend.output.outputs import RequestMetrics
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.integration.faults.asks import Ask, Reference
from tests.integration.faults.history import History

ASK = Ask(prompt=[1, 2, 3], max_tokens=6, seed=9)
CAUSES = ["was killed by SIGKILL"]


def output(tokens: list[int], end: str | None = None, index: int = 0) -> RequestOutput:
    """Return an output of a stream."""
    choice = CompletionOutput(index, "", tokens, end)
    return RequestOutput("r", None, [1, 2, 3], [choice], end is not None, RequestMetrics(0.0))


def problems(reference: Reference, history: History, *, must_complete: bool = True) -> str:
    """Return what the check finds, as text."""
    return "; ".join(history.check(reference, must_complete=must_complete, causes=CAUSES))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_complete_stream_is_right_and_each_fault_in_it_is_found(
    reference: Reference, kind: RequestOutputKind
) -> None:
    ask = Ask(prompt=[1, 2, 3], max_tokens=6, seed=9, output_kind=kind)
    (right,) = reference.choices(ask)
    whole = kind is RequestOutputKind.CUMULATIVE

    def told(*parts: list[int], end: str | None = "length") -> str:
        history, so_far = History(ask), list[int]()
        for number, part in enumerate(parts):
            so_far = so_far + part if whole else part
            history.take(output(so_far, end if number == len(parts) - 1 else None))
        return problems(reference, history)

    assert told(right[:2], right[2:]) == ""
    assert "differ at 2" in told(right[:2], right[1:5]), "a token came twice"
    assert "differ at 2" in told(right[:2], right[3:]), "a token is missing"
    assert "ended after 5 of 6" in told(right[:2], right[2:5])
    assert "ended with choices [] of 1" in told(right[:2], right[2:], end=None)
    assert "ended by 'abort'" in told(right[:2], end="abort")


def test_tokens_that_are_taken_back_are_found(reference: Reference) -> None:
    ask = Ask(prompt=[1, 2, 3], max_tokens=6, seed=9, output_kind=RequestOutputKind.CUMULATIVE)
    history, (right,) = History(ask), reference.choices(ask)
    history.take(output([*right[:2], 7]))
    history.take(output(right, "length"))
    assert "took back tokens" in problems(reference, history)


def test_a_choice_that_never_ends_or_goes_on_after_its_end_is_found(reference: Reference) -> None:
    ask = Ask(prompt=[1, 2, 3], max_tokens=6, seed=9, n=2)
    history, (first, _) = History(ask), reference.choices(ask)
    history.take(output(first, "length"))
    assert problems(reference, history) == "ended with choices [0] of 2"
    history.take(output([5]))
    assert "went on after its end" in problems(reference, history)


def test_an_error_must_name_the_cause_and_must_have_been_necessary(reference: Reference) -> None:
    def told(error: Exception, *, must_complete: bool) -> str:
        history = History(ASK, error=error)
        return problems(reference, history, must_complete=must_complete)

    named = EngineDeadError("worker 0 was killed by SIGKILL")
    assert told(named, must_complete=False) == ""
    assert "was lost" in told(named, must_complete=True)
    assert "names no cause" in told(EngineDeadError("it is dead"), must_complete=False)
    assert "another error" in told(RequestError("SIGKILL"), must_complete=False)


def test_a_reader_that_has_left_got_the_first_of_its_tokens(reference: Reference) -> None:
    history, (right,) = History(ASK, has_left=True), reference.choices(ASK)
    history.take(output(right[:2]))
    assert problems(reference, history) == ""
    history.take(output(right[3:4]))
    assert "differ at 2" in problems(reference, history)
