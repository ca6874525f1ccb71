"""The frontend that started the engine lets suspects run, and blames the cause of a death."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from sidestep.frontend.replicas.probation.probation import (
    Action,
    AskIdle,
    Blame,
    Claim,
    Park,
    Probation,
    Run,
)
from sidestep.ipc.transport.messages import Answer
from sidestep.ipc.transport.owner_line import Blamed, Claimed, Parked, Path, Turn

logger = logging.getLogger(__name__)

_ASK_S = 0.005
"""Seconds between two questions whether a replica has nothing to do."""


class Judge:
    """Carries out what a Probation decides. The methods belong to the event loop's thread."""

    def __init__(
        self,
        take: Callable[[Claimed | Turn | Parked | Blamed], None],
        ask_idle: Callable[[int], asyncio.Future[Answer]],
    ) -> None:
        """Begin without suspects.

        take: hands a decision to all frontends. ask_idle: asks a replica's core whether it has
        nothing to do.
        """
        self._take = take
        self._ask_idle = ask_idle
        self._probation = Probation()
        self._cause = ""
        """The cause of the last death in probation."""
        self._actions: deque[Action] = deque()
        self._is_acting = False

    def __repr__(self) -> str:
        return f"Judge({self._probation!r})"

    def begin(self, serving: Iterable[int]) -> None:
        """Take note of the replicas that serve at the start."""
        for replica in serving:
            self._act(self._probation.serves(replica))

    def attach(self) -> None:
        """Ask again in a new event loop."""
        self._act(self._probation.ask_again())

    def is_free(self, replica: int) -> bool:
        """Return whether a death of this replica now is expected, so that no budget is charged."""
        return self._probation.is_free(replica)

    def died(self, replica: int, cause: str, *, returns: bool, of_host: bool) -> None:
        """Take note of a death.

        returns: whether the replica is being started again. of_host: whether its host has gone: no
        request is the cause, and the replica may wait for another host.
        """
        if self._probation.runs_on(replica):
            self._cause = cause
        returns = returns and not of_host
        self._act(self._probation.died(replica, returns=returns, blames=not of_host))

    def serves(self, replica: int) -> None:
        """Take note that a replica serves again."""
        self._act(self._probation.serves(replica))

    def report(self, number: int, suspects: list[tuple[int, Path]]) -> None:
        """Take the reports of all frontends, in answer to a claim."""
        self._act(self._probation.reported(number, suspects))

    def passed(self, suspects: list[Path]) -> None:
        """Take note of suspects that have given tokens again, or have ended."""
        self._act(self._probation.passed(suspects))

    def _act(self, actions: Iterable[Action]) -> None:
        """Carry out actions, and those that follow from them, in order."""
        self._actions += actions
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._actions:
                self._do(self._actions.popleft())
        finally:
            self._is_acting = False

    def _do(self, action: Action) -> None:
        if isinstance(action, Claim):
            self._take(Claimed(*action))
        elif isinstance(action, AskIdle):
            self._ask(action.replica)
        elif isinstance(action, Run):
            logger.warning("%d requests run in probation", len(action.suspects))
            self._take(Turn(list(action.suspects)))
        elif isinstance(action, Park):
            self._take(Parked(list(action.suspects)))
        else:
            assert isinstance(action, Blame)
            self._take(Blamed(action.suspect, self._cause))

    def _ask(self, replica: int) -> None:
        number = self._probation.number

        def answered(answer: asyncio.Future[Answer]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return  # it has died, or the engine was shut down
            if number != self._probation.number:
                return
            if (answer.result().result or {})["idle"]:
                self._act(self._probation.idle(replica))
            else:
                asyncio.get_running_loop().call_later(_ASK_S, again)

        def again() -> None:
            if number == self._probation.number and self._probation.place == replica:
                self._ask(replica)

        self._ask_idle(replica).add_done_callback(answered)
