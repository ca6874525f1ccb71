"""How a runner answers calls: by its method that has the call's name.

No torch here: the fake runner must start without it.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestep.ipc.transport.worker_calls import CallAnswer, CallResult, SentCall, WorkerCall


class CallRefusedError(Exception):
    """A rank cannot do what a call asks for, and nothing has changed there.

    The message is for the caller. Any other exception ends the worker, like that of a step: it says
    that the rank may be left in any state.
    """


class TakesCalls:
    """The part of a runner that answers calls.

    The method of a call takes the call's struct and returns its result. It runs between two steps,
    on the thread that runs them.
    """

    def answer(self, sent: SentCall) -> CallAnswer:
        """Do what a call asks for, and return the answer, which may be a refusal."""
        method: Callable[[WorkerCall], CallResult] | None = getattr(self, sent.call.name, None)
        if method is None:
            return CallAnswer(
                number=sent.number,
                error=f"{sent.call.name}: {type(self).__name__} does not take this call",
            )
        try:
            return CallAnswer(number=sent.number, result=method(sent.call))
        except CallRefusedError as refusal:
            return CallAnswer(number=sent.number, error=f"{sent.call.name}: {refusal}")
