"""The processor that turns the core's columns into each request's outputs.

It makes one pass over a step; then each reader is notified once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.common.errors import RequestError
from sidestep.ipc.transport.messages import (
    Finished,
    FinishReason,
    Outputs,
    Started,
    unpack_ids,
)
from sidestep.ipc.transport.step import LogprobColumns

logger = logging.getLogger(__name__)

_REMEMBERED = 8192
"""Number of deliveries that are kept."""
_ID_BYTES = 4
_REREAD_S = 0.02
"""Seconds that the event loop has, after a deadline, to read outputs that have arrived."""


def each_token(column: bytes) -> Iterator[tuple[int, int, int, list[int], list[float]]]:
    """Yield key, position, rank, token ids and log-probabilities of each token.

    `column` holds packed LogprobColumns, or nothing.
    """
    if not column:
        return
    columns = LogprobColumns.unpack(column)
    ids, values, end = columns.token_ids.tolist(), columns.logprobs.tolist(), 0
    for key, position, rank, size in zip(
        columns.keys.tolist(),
        columns.positions.tolist(),
        columns.ranks.tolist(),
        columns.sizes.tolist(),
        strict=True,
    ):
        begin, end = end, end + size
        yield key, position, rank, ids[begin:end], values[begin:end]


class Delivery(NamedTuple):
    """The delivery of one step's tokens to a frontend.

    The times are those of ipc/transport/records.py.
    """

    number: int
    """Number of deliveries before it."""
    start_ns: int
    end_ns: int
    num_tokens: int


def _are_hidden(handles: Sequence[int], finished: Iterable[Finished]) -> list[bool]:
    """Return for each token of a step whether it is a stop token, which is no part of a text.

    The token that a request stops at comes in the same message as its end, behind the request's
    other tokens. handles: the request of each token.
    """
    last = {handle: index for index, handle in enumerate(handles)}
    hidden = [False] * len(handles)
    for each in finished:
        if each.reason == FinishReason.STOP and not each.completes_grammar:
            index = last.get(each.handle)
            if index is not None:
                hidden[index] = True
    return hidden


class OutputProcessor:
    """The processor of the outputs of all live requests of one frontend."""

    def __init__(self, abort_at_core: Callable[[list[int]], None]) -> None:
        self._states: dict[int, RequestState] = {}
        self._by_id: dict[str, list[RequestState]] = {}
        """The choices of each request that have not ended, by the request's id."""
        self._news: dict[int, RequestState] = {}
        """The choices with something new for their readers, by handle."""
        self._abort_at_core = abort_at_core
        self._deliveries: deque[Delivery] = deque(maxlen=_REMEMBERED)
        self._num_deliveries = 0
        self.num_waiting = 0
        """Number of requests that the engine has not scheduled yet."""
        self.num_waiting_tokens = 0
        """Number of tokens in the prompts of the waiting requests."""
        self.num_tokens = 0
        """Number of tokens that have come, of all requests."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def is_waiting(self, request_id: str) -> bool:
        """Return whether the engine has not scheduled any of this request's choices yet."""
        states = self._by_id.get(request_id, ())
        return bool(states) and all(state.is_waiting for state in states)

    def add(self, state: RequestState) -> None:
        """Expect the tokens of a request from now on."""
        self._states[state.handle] = state
        self._by_id.setdefault(state.request_id, []).append(state)
        self.num_waiting += 1
        self.num_waiting_tokens += state.num_prompt_tokens

    def handle(self, outputs: Outputs, more: bool = False) -> None:
        """Take one step's outputs for all requests.

        Tokens for requests that have ended here are dropped. more: another step's outputs follow at
        once. Readers are notified of both together, so that a frontend that is late notifies less
        often.
        """
        begin = time.monotonic_ns()
        self._handle_started(outputs.started)
        if outputs.logprobs or outputs.prompt_logprobs:
            self._handle_logprobs(outputs)
        if outputs.vectors:
            self._handle_vectors(outputs, begin / 1e9)
        ended = self._handle_tokens(outputs, begin / 1e9)
        for finished in outputs.finished:
            if (state := self._states.get(finished.handle)) is not None:
                self.remove(state)
                state.finished(finished)
        if not more:  # last, so that the tokens and the end of one message are one output
            ended += self._tell()
        if ended:
            self._abort_at_core(ended)
        if outputs.handles:
            count = len(outputs.handles) // _ID_BYTES
            self.num_tokens += count
            self._deliveries.append(
                Delivery(self._num_deliveries, begin, time.monotonic_ns(), count)
            )
            self._num_deliveries += 1

    def _handle_started(self, messages: Iterable[Started]) -> None:
        for started in messages:
            if (state := self._states.get(started.handle)) is not None:
                self._waits_no_more(state)
                state.started(started)

    def _handle_tokens(self, outputs: Outputs, now: float) -> list[int]:
        """Return the handles of the requests that their text has ended.

        A step may give a request several tokens. The tokens behind the one that has ended it are
        dropped.
        """
        handles: list[int] = unpack_ids(outputs.handles).tolist()
        ended, states, news = list[int](), self._states, self._news
        for handle, token, hidden in zip(
            handles,
            unpack_ids(outputs.token_ids).tolist(),
            _are_hidden(handles, outputs.finished) if outputs.finished else repeat(False),
            strict=False,
        ):
            state = states.get(handle)
            if state is None:
                continue
            try:
                if not state.add_token(token, now, hidden):
                    continue
            except Exception as error:  # an error in one request's text must not stop the others
                logger.exception("request %r could not be detokenised", state.request_id)
                state.fail(RequestError(f"its text could not be made: {error}"))
            news[handle] = state
            if state.is_finished:
                self.remove(state)
                ended.append(handle)
        return ended

    def _tell(self) -> list[int]:
        """Notify the readers of their news, and return the handles that this has ended."""
        ended = []
        for handle, state in self._news.items():
            try:
                state.tell()
            except Exception as error:
                logger.exception("an output of request %r could not be delivered", state.request_id)
                self.remove(state)
                ended.append(handle)
                state.fail(RequestError(f"its output could not be delivered: {error}"))
        self._news.clear()
        return ended

    def _handle_logprobs(self, outputs: Outputs) -> None:
        for handle, _, rank, ids, values in each_token(outputs.logprobs):
            if (state := self._states.get(handle)) is not None:
                state.add_logprobs(rank, ids, values)
        for handle, position, rank, ids, values in each_token(outputs.prompt_logprobs):
            if (state := self._states.get(handle)) is not None:
                state.add_prompt_logprobs(position, rank, ids, values)

    def _handle_vectors(self, outputs: Outputs, now: float) -> None:
        handles: list[int] = unpack_ids(outputs.pooled).tolist()
        vectors = np.frombuffer(outputs.vectors, np.float32).reshape(len(handles), -1)
        for handle, vector in zip(handles, vectors, strict=True):
            if (state := self._states.get(handle)) is not None:
                state.add_vector(vector, now)

    @property
    def deliveries(self) -> list[Delivery]:
        """The last deliveries, oldest first."""
        return list(self._deliveries)

    def abort(self, request_ids: list[str]) -> None:
        """End requests by their ids; unknown ids have ended already.

        Their readers get the output so far.
        """
        states = [state for i in request_ids for state in self._by_id.get(i, ())]
        for state in states:
            self.remove(state)
            state.abort()
        if states:
            self._abort_at_core([state.handle for state in states])

    def end_at(self, state: RequestState, deadline: float) -> None:
        """End a request at `deadline` (time.monotonic()) if its core has not ended it.

        The core may hang or be dead.
        """
        loop = asyncio.get_running_loop()

        def end() -> None:
            if state.handle in self._states:
                self.remove(state)
                state.abort("deadline")
                self._abort_at_core([state.handle])

        def reread() -> None:
            # A loop that was delayed may run this timer before it reads what the core sent in time,
            # so it reads that first.
            state.timer = loop.call_later(_REREAD_S, end)

        state.timer = loop.call_later(max(0.0, deadline - time.monotonic()), reread)

    def drop(self, states: Iterable[RequestState]) -> None:
        """End at the core those of these choices that have not ended: their reader has left."""
        live = [state for state in states if state.handle in self._states]
        for state in live:
            self.remove(state)
        if live:
            self._abort_at_core([state.handle for state in live])

    def tokens_of(self, handle: int) -> list[int] | None:
        """Return the tokens of a request so far; None if it has ended."""
        state = self._states.get(handle)
        return None if state is None else state.token_ids

    def fail_all(self, error: Exception) -> None:
        """Give every reader an exception like this one."""
        self.fail(list(self._states), error)

    def fail(self, handles: Iterable[int], error: Exception) -> None:
        """Give the readers of these handles, which have not ended, an exception like this one."""
        for state in [self._states[handle] for handle in handles]:
            self.remove(state)
            # Each reader gets an exception of its own: one that is raised many times collects the
            # frames of all its raisers.
            state.fail(type(error)(*error.args))

    def remove(self, state: RequestState) -> None:
        """Expect no more tokens of a request."""
        del self._states[state.handle]
        together = self._by_id[state.request_id]
        together.remove(state)
        if not together:
            del self._by_id[state.request_id]
        self._waits_no_more(state)
        if state.timer is not None:
            state.timer.cancel()

    def _waits_no_more(self, state: RequestState) -> None:
        if state.is_waiting:
            state.is_waiting = False
            self.num_waiting -= 1
            self.num_waiting_tokens -= state.num_prompt_tokens
