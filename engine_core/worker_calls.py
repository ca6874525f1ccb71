"""The calls of frontends to the workers: one at a time, in the order in which they came.

A call of which `awaits_idle` holds is sent when all requests have ended. From the moment when it is
next, and as long as the engine sleeps, the messages about new requests are held here. They are
taken when the engine is awake again. The caller gets an error when the ranks do not answer in time.
Their answer is taken all the same when it comes: what the workers do next depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sidestep.executor.base import Answered, Executor
from sidestep.ipc.transport.envelope import handles_of
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CallWorkers,
    WorkersChanged,
)
from sidestep.ipc.transport.worker_calls import ApplyWeights, CallResult, Sleep, WakeUp


@dataclass(slots=True, eq=False)
class _Asked:
    """A call that has not been answered."""

    message: CallWorkers
    until: float
    """Time at which the caller gets an error: while it waits for the requests, then for the ranks.
    """
    is_told: bool = False
    """Whether the caller has got its answer, and the ranks have not answered yet."""

    def answer(
        self, results: list[CallResult] | None = None, error: str | None = None
    ) -> tuple[int, Answer]:
        """Return the caller's number and the answer for it."""
        self.is_told = True
        answer = Answer(call_id=self.message.call_id, results=results or [], error=error)
        return self.message.client, answer


@dataclass(slots=True)
class WorkerCalls:
    """The calls that wait, the calls that the ranks have, and the messages that are held."""

    executor: Executor
    is_idle: Callable[[], bool]
    """Return whether no request runs or waits, and no step is in flight."""
    drop_prefix_cache: Callable[[], object]
    clock: Callable[[], float]
    sleep_level: int = 0
    """The level at which the workers sleep; 0 while they are awake."""
    weights: str | None = None
    """Folder of the weights in use; None for those of the start."""
    _told: WorkersChanged = field(default_factory=WorkersChanged)
    _waiting: deque[_Asked] = field(default_factory=deque)
    _sent: dict[int, _Asked] = field(default_factory=dict)
    """By number. All but the last have come to their time limit."""
    _held: list[AddRequest | AbortRequests] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"WorkerCalls(waiting={len(self._waiting)}, sent={len(self._sent)}, "
            f"held={len(self._held)}, sleep_level={self.sleep_level})"
        )

    # Messages of frontends.

    def ask(self, message: CallWorkers) -> None:
        """Take a call, which `turn` sends when it is next."""
        self._waiting.append(_Asked(message, self.clock() + message.wait_s))

    def cancel(self, client: int, call_id: int) -> None:
        """Drop a call that has not been sent."""
        self._drop(lambda one: (one.client, one.call_id) == (client, call_id))

    def hold(self, message: AddRequest | AbortRequests) -> bool:
        """Keep a message about requests for later, if it must wait; return whether it must."""
        if not self.holds_requests:
            return False
        if isinstance(message, AbortRequests):
            self._held = [one for one in self._held if not _is_ended_by(one, message)]
        self._held.append(message)
        return True

    def client_left(self, client: int) -> None:
        """Drop what a frontend has left behind."""
        self._drop(lambda one: one.client == client)
        self._held = [message for message in self._held if message.client != client]

    def _drop(self, is_unwanted: Callable[[CallWorkers], bool]) -> None:
        self._waiting = deque(one for one in self._waiting if not is_unwanted(one.message))

    # The turn.

    @property
    def has_any(self) -> bool:
        """Whether a turn may have something to do; most often it has not."""
        return bool(self._waiting or self._sent or self._held)

    @property
    def holds_requests(self) -> bool:
        """Whether new requests must wait."""
        first = [*self._sent.values(), *([self._waiting[0]] if self._waiting else [])]
        return self.sleep_level > 0 or any(one.message.call.awaits_idle for one in first)

    @property
    def is_busy(self) -> bool:
        """Whether the ranks are within the time that they have for a call."""
        return any(not one.is_told for one in self._sent.values())

    def turn(self) -> list[tuple[int, Answer]]:
        """Take the ranks' answers, send the next call, and return the answers by client."""
        answers = [
            answer
            for answered in self.executor.take_answered()
            if (answer := self._take(answered)) is not None
        ]
        for number, one in self._sent.items():
            if not one.is_told and one.until <= self.clock():
                answers.append(
                    one.answer(
                        error=f"{one.message.call.name}: {self.executor.missing_ranks(number)} "
                        f"did not answer in {one.message.call.timeout_s:g} s"
                    )
                )
        while self._waiting and not self.is_busy:
            first = self._waiting[0]
            alone = self._answer_alone(first)
            if alone is None and first.message.call.awaits_idle and not self.is_idle():
                break
            self._waiting.popleft()
            if alone is None:
                self._send(first)
            else:
                answers.append(alone)
        return answers

    def take_held(self) -> list[AddRequest | AbortRequests]:
        """Return the messages that need not wait any more, in the order in which they came."""
        if self.holds_requests:
            return []
        held, self._held = self._held, []
        return held

    def take_change(self) -> WorkersChanged | None:
        """Return what the workers are now, if that has changed since the last time."""
        now = WorkersChanged(sleep_level=self.sleep_level, weights=self.weights)
        if now == self._told:
            return None
        self._told = now
        return now

    @property
    def num_held(self) -> int:
        """Number of requests in the messages that are held."""
        return sum(
            len(handles_of(message)) for message in self._held if isinstance(message, AddRequest)
        )

    def next_deadline(self) -> float | None:
        """Return the time of the next turn, on the clock; None for no limit."""
        times = [one.until for one in self._sent.values() if not one.is_told]
        if not times and self._waiting and self._waiting[0].message.call.awaits_idle:
            times.append(self._waiting[0].until)
        return min(times, default=None)

    def _answer_alone(self, one: _Asked) -> tuple[int, Answer] | None:
        """Return the answer to a call that the ranks need not see, or None."""
        call = one.message.call
        if isinstance(call, WakeUp) and not self.holds_requests:
            return one.answer()
        if isinstance(call, Sleep) and self.sleep_level == call.level:
            return one.answer()
        if self.sleep_level and not call.works_asleep:
            return one.answer(
                error=f"{call.name}: the engine sleeps at level {self.sleep_level}; wake it up "
                "first"
            )
        if call.awaits_idle and one.until <= self.clock() and not self.is_idle():
            return one.answer(
                error=f"{call.name}: requests still ran after {one.message.wait_s:g} s; wait for "
                "them or abort them first"
            )
        return None

    def _send(self, one: _Asked) -> None:
        call = one.message.call
        if call.drops_prefix_cache:
            self.drop_prefix_cache()
        one.until = self.clock() + call.timeout_s
        self._sent[self.executor.call(call)] = one

    def _take(self, answered: Answered) -> tuple[int, Answer] | None:
        """Take the ranks' answers to a call, and return the answer for the caller if it waits."""
        one = self._sent.pop(answered.number)
        call = one.message.call
        if isinstance(call, Sleep) and answered.num_refused < len(answered.results):
            # If some ranks have refused, the others must be woken, which is nothing to the former.
            self.sleep_level = call.level
        elif isinstance(call, WakeUp) and not answered.num_refused:
            self.sleep_level = 0
        elif isinstance(call, ApplyWeights) and not answered.num_refused:
            self.weights = call.folder
        return None if one.is_told else one.answer(answered.results, answered.error)


def _is_ended_by(message: AddRequest | AbortRequests, abort: AbortRequests) -> bool:
    """Return whether a message adds a request of which no choice is wanted any more."""
    return (
        isinstance(message, AddRequest)
        and message.client == abort.client
        and set(handles_of(message)) <= set(abort.handles)
    )
