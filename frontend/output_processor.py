"""From the core's columns to each request's outputs: one pass over a step, at most one pending output a request.

A request's mailbox holds what its reader has not taken yet; tokens that come meanwhile are merged into it. So a slow
reader costs neither memory nor wake-ups, and a fast one gets every token as it comes. A FINAL_ONLY request wakes
nobody until it ends. A reader that only writes on what it gets can have its outputs pushed (`RequestState.push`): then
no task is woken for a token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from types import TracebackType
from typing import NamedTuple, Self

from sidestep.frontend.detokenizer import Detokenizer
from sidestep.frontend.input_processor import ProcessedRequest
from sidestep.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.errors import RequestError
from sidestep.ipc.messages import Finished, FinishReason, Outputs, Started, unpack_ids
from sidestep.ipc.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

_REMEMBERED = 8192
"""Deliveries that are remembered."""
_ID_BYTES = 4


Sink = Callable[[Callable[[], RequestOutput]], bool]
"""Where outputs are pushed to. It is given what makes the next output, which it may use until it returns. False if it
can take none now: then outputs merge until its reader asks for them."""


class RequestState:
    """One live request: its text so far, and the mailbox of its one reader."""

    def __init__(self, handle: int, request_id: str, request: ProcessedRequest, tokenizer: Tokenizer,
                 stream_interval: int = 1) -> None:
        """stream_interval: tokens that must be new before the reader is told, but for the first and the last."""
        self.handle = handle
        self._interval = stream_interval
        self.request_id = request_id
        self._request = request
        self._is_delta = request.sampling.output_kind == RequestOutputKind.DELTA
        self._token_ids: list[int] = []
        self._metrics = RequestMetrics(arrival_time=request.arrival)
        self._num_cached: int | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: Exception | None = None
        self._taken_tokens = 0
        self._due_at: float = math.inf if request.sampling.output_kind == RequestOutputKind.FINAL_ONLY else 1
        """Number of tokens from which the reader has something to take."""
        self._taken_text = 0
        self._wake: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._completion = CompletionOutput(0, "", [])
        self._output = RequestOutput(request_id, request.prompt, request.prompt_token_ids, [self._completion], False,
                                     self._metrics)
        """The latest. One that is pushed is used up when the next one comes, so this one is pushed again and again."""
        self.is_waiting = True
        """Whether the engine has not scheduled it yet."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._detokenizer: Detokenizer | None = None
        if request.sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, stop=request.sampling.stop_strings,
                include_stop=request.sampling.include_stop_str_in_output,
                skip_special_tokens=request.sampling.skip_special_tokens, min_tokens=request.sampling.min_tokens)

    def __repr__(self) -> str:
        state = self._finish_reason or ("failed" if self._error is not None else "live")
        return f"RequestState({self.request_id!r}, {state}, {len(self._token_ids)} tokens, {self._taken_tokens} taken)"

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finish_reason is not None or self._error is not None

    # What the engine says.

    def queued(self) -> None:
        """It is on its way to the core."""
        self._metrics.queued_ts = time.monotonic()

    def started(self, message: Started) -> None:
        """It was scheduled for the first time."""
        self._num_cached = message.num_cached_tokens
        self._metrics.scheduled_ts = message.scheduled

    def add_token(self, token: int, now: float, hidden: bool = False) -> bool:
        """One more token. True if there is something to tell: enough are new, or its text completes a stop string,
        which ends the request. `hidden`: a stop token, which ends the output without being part of its text."""
        self._token_ids.append(token)
        metrics = self._metrics
        metrics.last_token_ts = now
        if metrics.first_token_ts is None:
            metrics.first_token_ts = now
        if self._detokenizer is not None and not (hidden and not self._request.sampling.include_stop_str_in_output):
            stop = self._detokenizer.add(token)
            if stop is not None:
                self._finish_reason, self._stop_reason = str(FinishReason.STOP), stop
                return True
        return len(self._token_ids) >= self._due_at

    def tell(self) -> None:
        """There is something new, in `handle`'s last pass: pushes it, or wakes the reader."""
        if self._sink is None or self.is_finished or not self._sink(self._next):
            self._sink = None
            self._wake_reader()

    def finished(self, message: Finished) -> None:
        """The engine has ended it."""
        self._metrics.num_preemptions = message.num_preemptions
        if message.reason == FinishReason.ERROR:
            self.fail(RequestError(message.error or "the request failed"))
            return
        self._finish_reason, self._stop_reason = str(message.reason), message.stop_reason
        stop = self._detokenizer.finish() if self._detokenizer is not None else None
        if stop is not None:
            self._finish_reason, self._stop_reason = str(FinishReason.STOP), stop
        self._wake_reader()

    def abort(self) -> None:
        """The user has ended it."""
        self.finished(Finished(handle=self.handle, reason=FinishReason.ABORT))

    def fail(self, error: Exception) -> None:
        """Its reader gets this exception."""
        self._error = error
        self._wake_reader()

    # What its reader does.

    async def next_output(self) -> RequestOutput:
        """The next output, as soon as there is something new. Raises what the request failed with."""
        while not self._has_news():
            await self._news()
        if self._error is not None:
            raise self._error
        return self._take()

    async def push(self, sink: Sink) -> None:
        """Has outputs pushed to `sink` from now on, in the callback in which they come; `next_output` has what did not
        go that way. Returns when the sink is not ready for one, or the request has ended."""
        if self._has_news():
            return
        self._sink = sink
        try:
            await self._news()
        finally:
            self._sink = None

    async def _news(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _has_news(self) -> bool:
        return len(self._token_ids) >= self._due_at or self.is_finished

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _take(self) -> RequestOutput:
        """The next output, for good."""
        output = copy(self._next())
        output.outputs = [copy(self._completion)]
        return output

    def _next(self) -> RequestOutput:
        """The next output, until there is another."""
        completion, tokens = self._completion, self._token_ids
        text = self._detokenizer.text if self._detokenizer is not None else ""
        count = self._metrics.num_generation_tokens = len(tokens)
        if self._is_delta:
            completion.text, completion.token_ids = text[self._taken_text:], tokens[self._taken_tokens:]
        else:
            completion.text, completion.token_ids = text, tokens.copy()
        self._taken_tokens, self._taken_text = count, len(text)
        self._due_at = count + self._interval
        completion.finish_reason, completion.stop_reason = self._finish_reason, self._stop_reason
        self._output.finished, self._output.num_cached_tokens = self._finish_reason is not None, self._num_cached
        return self._output


class Delivery(NamedTuple):
    """One step's tokens taken in by a frontend; times as in ipc.records."""

    number: int
    """How many had come before it."""
    start_ns: int
    end_ns: int
    num_tokens: int


class OutputProcessor:
    """All live requests of one frontend."""

    def __init__(self, abort_at_core: Callable[[list[int]], None]) -> None:
        self._states: dict[int, RequestState] = {}
        self._by_id: dict[str, RequestState] = {}
        self._news: dict[int, RequestState] = {}
        """Those whose readers are to be told of something."""
        self._abort_at_core = abort_at_core
        self._deliveries: deque[Delivery] = deque(maxlen=_REMEMBERED)
        self._num_deliveries = 0
        self.num_waiting = 0
        """Requests that the engine has not scheduled yet."""
        self.num_waiting_tokens = 0
        """The tokens of their prompts."""
        self.num_tokens = 0
        """Tokens that have come, of all requests."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, state: RequestState) -> None:
        """From now on its tokens are expected."""
        self._states[state.handle] = state
        self._by_id[state.request_id] = state
        self.num_waiting += 1
        self.num_waiting_tokens += state.num_prompt_tokens

    def handle(self, outputs: Outputs, more: bool = False) -> None:
        """One step's news for all requests. Tokens for requests that have ended here are dropped. more: another step's
        follow at once; readers are told of both together, so that a frontend that is late tells less often."""
        begin = time.monotonic_ns()
        for started in outputs.started:
            if (state := self._states.get(started.handle)) is not None:
                self._waits_no_more(state)
                state.started(started)
        # The token that a request stops at comes in the same message as its end.
        hidden = {f.handle for f in outputs.finished if f.reason == FinishReason.STOP} if outputs.finished else ()
        now, ended, states = begin / 1e9, list[int](), self._states
        news = self._news
        for handle, token in zip(unpack_ids(outputs.handles).tolist(), unpack_ids(outputs.token_ids).tolist(),
                                 strict=True):
            state = states.get(handle)
            if state is None:
                continue
            try:
                has_news = state.add_token(token, now, handle in hidden)
            except Exception as error:  # whatever is wrong with one request's text, the others go on
                logger.exception("request %r could not be detokenised", state.request_id)
                state.fail(RequestError(f"its text could not be made: {error}"))
                has_news = True
            if has_news:
                news[handle] = state
                if state.is_finished:
                    self.remove(state)
                    ended.append(handle)
        for finished in outputs.finished:
            if (state := states.get(finished.handle)) is not None:
                self.remove(state)
                state.finished(finished)
        if not more:  # last, so that the tokens and the end that one message brings are one output
            ended += self._tell()
        if ended:
            self._abort_at_core(ended)
        if outputs.handles:
            count = len(outputs.handles) // _ID_BYTES
            self.num_tokens += count
            self._deliveries.append(Delivery(self._num_deliveries, begin, time.monotonic_ns(), count))
            self._num_deliveries += 1

    def _tell(self) -> list[int]:
        """Tells readers what is new; the handles of those who failed at it."""
        failed = []
        for handle, state in self._news.items():
            try:
                state.tell()
            except Exception as error:
                logger.exception("an output of request %r could not be delivered", state.request_id)
                self.remove(state)
                failed.append(handle)
                state.fail(RequestError(f"its output could not be delivered: {error}"))
        self._news.clear()
        return failed

    @property
    def deliveries(self) -> list[Delivery]:
        """The last ones, oldest first."""
        return list(self._deliveries)

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests by their ids; unknown ones have ended already. Their readers get what there is."""
        states = [self._by_id[i] for i in request_ids if i in self._by_id]
        for state in states:
            self.remove(state)
            state.abort()
        if states:
            self._abort_at_core([state.handle for state in states])

    def drop(self, state: RequestState) -> None:
        """Its reader has left: ends it at the core unless it has ended."""
        if state.handle in self._states:
            self.remove(state)
            self._abort_at_core([state.handle])

    def fail_all(self, error: Exception) -> None:
        """Every reader gets an exception like this one."""
        for state in list(self._states.values()):
            self.remove(state)
            # One each: an exception that is raised many times collects the frames of all who raised it.
            state.fail(type(error)(*error.args))

    def remove(self, state: RequestState) -> None:
        """No more tokens are expected."""
        del self._states[state.handle]
        del self._by_id[state.request_id]
        self._waits_no_more(state)

    def _waits_no_more(self, state: RequestState) -> None:
        if state.is_waiting:
            state.is_waiting = False
            self.num_waiting -= 1
            self.num_waiting_tokens -= state.num_prompt_tokens


class RequestStream:
    """One request's outputs, for its one reader. Leaving its `with` ends the request."""

    def __init__(self, state: RequestState, processor: OutputProcessor) -> None:
        self._state = state
        self._processor = processor
        self.next = state.next_output
        self.push = state.push

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._processor.drop(self._state)
