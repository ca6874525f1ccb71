"""How a rank answers calls: by a method that has the call's name, of one of the runner's parts.

No torch here: the fake runner must start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sidestep.ipc.transport.worker_calls import CallAnswer, CallResult, SentCall, WorkerCall


class CallRefusedError(Exception):
    """A rank cannot do what a call asks for, and nothing has changed there.

    The message is for the caller. Any other exception ends the worker, like that of a step: it says
    that the rank may be left in any state.
    """


def answer_call(sent: SentCall, parts: Iterable[object]) -> CallAnswer:
    """Do what a call asks for, and return the answer, which may be a refusal.

    parts: the objects that take calls. The method of a call takes the call's struct and returns its
    result. It runs between two steps, on the thread that runs them.
    """
    name = sent.call.name
    methods = (getattr(part, name) for part in parts if hasattr(part, name))
    method: Callable[[WorkerCall], CallResult] | None = next(methods, None)
    if method is None:
        return CallAnswer(number=sent.number, error=f"{name}: this device does not take this call")
    try:
        return CallAnswer(number=sent.number, result=method(sent.call))
    except CallRefusedError as refusal:
        return CallAnswer(number=sent.number, error=f"{name}: {refusal}")
