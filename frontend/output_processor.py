"""From the core's columns to each request's outputs: one pass over a step, at most one pending output a request.

A request's mailbox holds what its reader has not taken yet; tokens that come meanwhile are merged into it. So a slow
reader costs neither memory nor wake-ups, and a fast one gets every token as it comes. A FINAL_ONLY request wakes
nobody until it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidestep.frontend.detokenizer import Detokenizer
from sidestep.frontend.input_processor import ProcessedRequest
from sidestep.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.errors import RequestError
from sidestep.ipc.messages import Finished, FinishReason, Outputs, Started, unpack_ids
from sidestep.ipc.sampling_params import RequestOutputKind


class RequestState:
    """One live request: its text so far, and the mailbox of its one reader."""

    def __init__(self, handle: int, request_id: str, request: ProcessedRequest, tokenizer: Tokenizer) -> None:
        self.handle = handle
        self.request_id = request_id
        self._request = request
        self._kind = request.sampling.output_kind
        self._token_ids: list[int] = []
        self._metrics = RequestMetrics(arrival_time=request.arrival)
        self._num_cached: int | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: Exception | None = None
        self._taken_tokens = 0
        self._taken_text = 0
        self._wake: asyncio.Future[None] | None = None
        self._detokenizer: Detokenizer | None = None
        if request.sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, stop=request.sampling.stop_strings,
                include_stop=request.sampling.include_stop_str_in_output,
                skip_special_tokens=request.sampling.skip_special_tokens)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finish_reason is not None or self._error is not None

    # What the engine says.

    def started(self, message: Started) -> None:
        """It was scheduled for the first time."""
        self._num_cached = message.num_cached_tokens
        self._metrics.scheduled_ts = message.scheduled

    def add_token(self, token: int, now: float) -> bool:
        """One more token. True if its text completes a stop string, which ends the request here."""
        self._token_ids.append(token)
        metrics = self._metrics
        metrics.last_token_ts = now
        if metrics.first_token_ts is None:
            metrics.first_token_ts = now
        stop = self._detokenizer.add(token) if self._detokenizer is not None else None
        if stop is not None:
            self._finish_reason, self._stop_reason = str(FinishReason.STOP), stop
        if self._wake is not None and (self._kind != RequestOutputKind.FINAL_ONLY or stop is not None):
            self._wake_reader()
        return stop is not None

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
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        if self._error is not None:
            raise self._error
        return self._take()

    def _has_news(self) -> bool:
        if self.is_finished:
            return True
        return self._kind != RequestOutputKind.FINAL_ONLY and len(self._token_ids) > self._taken_tokens

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _take(self) -> RequestOutput:
        text = self._detokenizer.text if self._detokenizer is not None else ""
        tokens = self._token_ids
        self._metrics.num_generation_tokens = len(tokens)
        if self._kind == RequestOutputKind.DELTA:
            completion = CompletionOutput(0, text[self._taken_text:], tokens[self._taken_tokens:])
        else:
            completion = CompletionOutput(0, text, tokens.copy())
        self._taken_tokens, self._taken_text = len(tokens), len(text)
        completion.finish_reason, completion.stop_reason = self._finish_reason, self._stop_reason
        return RequestOutput(
            request_id=self.request_id, prompt=self._request.prompt, prompt_token_ids=self._request.prompt_token_ids,
            outputs=[completion], finished=self.is_finished, metrics=self._metrics, num_cached_tokens=self._num_cached)


class OutputProcessor:
    """All live requests of one frontend."""

    def __init__(self, abort_at_core: Callable[[list[int]], None]) -> None:
        self._states: dict[int, RequestState] = {}
        self._by_id: dict[str, RequestState] = {}
        self._abort_at_core = abort_at_core

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, state: RequestState) -> None:
        """From now on its tokens are expected."""
        self._states[state.handle] = state
        self._by_id[state.request_id] = state

    def handle(self, outputs: Outputs) -> None:
        """One step's news for all requests. Tokens for requests that have ended here are dropped."""
        for started in outputs.started:
            if (state := self._states.get(started.handle)) is not None:
                state.started(started)
        now, stopped, states = time.monotonic(), [], self._states
        for handle, token in zip(unpack_ids(outputs.handles).tolist(), unpack_ids(outputs.token_ids).tolist(),
                                 strict=True):
            state = states.get(handle)
            if state is not None and state.add_token(token, now):
                self.remove(state)
                stopped.append(handle)
        for finished in outputs.finished:
            if (state := states.get(finished.handle)) is not None:
                self.remove(state)
                state.finished(finished)
        if stopped:
            self._abort_at_core(stopped)

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
        """Every reader gets this exception."""
        for state in list(self._states.values()):
            self.remove(state)
            state.fail(error)

    def remove(self, state: RequestState) -> None:
        """No more tokens are expected."""
        del self._states[state.handle]
        del self._by_id[state.request_id]
