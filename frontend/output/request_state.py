"""The state of one request in its frontend: its text so far, and the mailbox of its one reader.

The mailbox holds the outputs that the reader has not taken yet; tokens that come meanwhile are
merged into it. So a slow reader costs neither memory nor wake-ups, and a fast one gets every token
as it comes. A FINAL_ONLY request wakes no reader until it ends. A reader that only passes its
outputs on can have them pushed (`RequestState.push`): then no task is woken for a token.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

from sidestep.frontend.input.input_processor import ProcessedRequest
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.detokenizer import Detokenizer
from sidestep.frontend.output.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from sidestep.ipc.common.errors import RequestError, ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind
from sidestep.ipc.transport.messages import Beam, Finished, FinishReason, Started
from sidestep.ipc.transport.step import Float32


class Sink(Protocol):
    """The interface of a receiver of pushed outputs."""

    def ready(self) -> bool:
        """Return whether it can take an output now.

        If not, outputs are merged until its reader asks for them.
        """

    def put(self, output: RequestOutput) -> None:
        """Take an output."""


class RequestState:
    """One live request, or one choice of it, with its text and its reader's mailbox."""

    def __init__(
        self,
        handle: int,
        request_id: str,
        request: ProcessedRequest,
        tokenizer: Tokenizer,
        stream_interval: int = 1,
        index: int = 0,
    ) -> None:
        """Begin with a request that is about to be sent.

        stream_interval: new tokens between two outputs, except for the first and the last output.
        index: the index of the choice in its request.
        """
        self.handle = handle
        self.index = index
        self._interval = stream_interval
        self.request_id = request_id
        self._request = request
        self.output_kind = request.sampling.output_kind
        self.best_of = request.best_of
        self._token_ids: list[int] = []
        self.metrics = RequestMetrics(arrival_time=request.arrival)
        self._num_cached: int | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: Exception | None = None
        self.beams: list[Beam] = []
        """The continuations that a beam search has found, once it has ended."""
        self.vector: Float32 | None = None
        """The vector that the model made of the prompt, if it pools."""
        self._taken_tokens = 0
        self._due_at: float = math.inf if self.output_kind is RequestOutputKind.FINAL_ONLY else 1
        """Number of tokens from which the reader has something to take."""
        self._taken_text = 0
        self._tokenizer = tokenizer
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._wake: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Timer that ends the request at its deadline."""
        self.is_waiting = True
        """Whether the engine has not scheduled it yet."""
        self.num_prompt_tokens = len(request.prompt_token_ids) if index == 0 else 0
        """Number of prompt tokens that are computed for this choice.

        A prompt is computed once for all choices of its request, so the first choice counts it.
        """
        self._detokenizer: Detokenizer | None = None
        if request.sampling.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                stop=request.sampling.stop_strings,
                include_stop=request.sampling.include_stop_str_in_output,
                skip_special_tokens=request.sampling.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
            )

    def __repr__(self) -> str:
        state = self._finish_reason or ("failed" if self._error is not None else "live")
        return (
            f"RequestState({self.request_id!r}, {state}, {len(self._token_ids)} tokens, "
            f"{self._taken_tokens} taken)"
        )

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finish_reason is not None or self._error is not None

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self._token_ids.copy()

    @property
    def has_failed(self) -> bool:
        """Whether its reader gets an exception."""
        return self._error is not None

    # Messages from the engine.

    def share_prompt(self, first: RequestState) -> None:
        """Use the prompt logprobs of the request's first choice."""
        self._prompt_logprobs = first._prompt_logprobs

    def queued(self) -> None:
        """Note that the request is about to be sent to the core."""
        self.metrics.queued_ts = time.monotonic()

    def started(self, message: Started) -> None:
        """Note that the request was scheduled.

        This happens again after the death of a replica, and then changes nothing once tokens have
        come.
        """
        if self._token_ids:
            return
        self._num_cached = message.num_cached_tokens
        self.metrics.scheduled_ts = message.scheduled

    def add_token(self, token: int, now: float, hidden: bool = False) -> bool:
        """Add a token, and return whether the reader is to be notified.

        The reader is notified when enough tokens are new, or when the text completes a stop string,
        which ends the request here. hidden: the token is a stop token, which ends the output
        without being part of its text.
        """
        self._token_ids.append(token)
        metrics = self.metrics
        metrics.last_token_ts = now
        if metrics.first_token_ts is None:
            metrics.first_token_ts = now
        if self._detokenizer is not None and not (
            hidden and not self._request.sampling.include_stop_str_in_output
        ):
            stop = self._detokenizer.add(token)
            if stop is not None:
                self._finish_reason, self._stop_reason = str(FinishReason.STOP), stop
                return True
        return len(self._token_ids) >= self._due_at

    def add_vector(self, vector: Float32, now: float) -> None:
        """Take the vector of the prompt; the end of the request comes with it."""
        self.vector = vector
        self.metrics.first_token_ts = self.metrics.last_token_ts = now

    def tell(self) -> None:
        """Push the new output, or wake the reader."""
        sink = self._sink
        if sink is not None and not self.is_finished and sink.ready():
            sink.put(self.take())
        else:
            self._sink = None
            self._wake_reader()

    def finished(self, message: Finished) -> None:
        """Note that the engine has ended the request."""
        self.metrics.num_preemptions = message.num_preemptions
        if (drafts := message.drafts) is not None:
            self.metrics.num_drafts = drafts.num_drafts
            self.metrics.num_draft_tokens = drafts.num_draft_tokens
            self.metrics.num_accepted_tokens = drafts.num_accepted_tokens
        if message.reason == FinishReason.ERROR:
            problem = message.error or "the request failed"
            self.fail(
                RequestError(problem)
                if message.field is None
                else ValidationError(message.field, problem)
            )
            return
        self._finish_reason, self._stop_reason = str(message.reason), message.stop_reason
        self.beams = message.beams
        stop = self._detokenizer.finish() if self._detokenizer is not None else None
        if stop is not None:
            self._finish_reason, self._stop_reason = str(FinishReason.STOP), stop
        self._wake_reader()

    def abort(self, why: str | None = None) -> None:
        """End the request here: the user has aborted it, or its deadline has passed.

        why: the stop reason.
        """
        self.finished(Finished(handle=self.handle, reason=FinishReason.ABORT, stop_reason=why))

    def fail(self, error: Exception) -> None:
        """End the request with an exception for its reader."""
        self._error = error
        self._wake_reader()

    def add_logprobs(self, rank: int, token_ids: list[int], values: list[float]) -> None:
        """Add the logprobs of the token that comes next, which is the first of `token_ids`.

        They come before the tokens of their step, and for tokens behind the request's end too.
        """
        self._logprobs.append(self._make_logprobs(rank, token_ids, values))

    def add_prompt_logprobs(
        self, position: int, rank: int, token_ids: list[int], values: list[float]
    ) -> None:
        """Add the logprobs of the prompt's token at this position.

        After a preemption some come again, and are ignored.
        """
        if position == len(self._prompt_logprobs):
            self._prompt_logprobs.append(self._make_logprobs(rank, token_ids, values))

    def _make_logprobs(
        self, rank: int, token_ids: list[int], values: list[float]
    ) -> dict[int, Logprob]:
        text = (
            self._tokenizer.token_text if self._request.sampling.detokenize else lambda token: None
        )
        made = {token_ids[0]: Logprob(values[0], rank, text(token_ids[0]))}
        for i in range(1, len(token_ids)):
            if token_ids[i] not in made:
                made[token_ids[i]] = Logprob(values[i], i, text(token_ids[i]))
        return made

    # The reader.

    async def next_output(self) -> RequestOutput:
        """Return the next output, as soon as there is something new.

        Raises the error that the request failed with.
        """
        while not self.has_news():
            await self._news()
        return self.take()

    async def push(self, sink: Sink) -> None:
        """Push outputs to `sink` from now on, in the callback in which they come.

        Return when the sink is not ready for an output, or when the request has ended.
        `next_output` has the outputs that were not pushed.
        """
        if self.has_news():
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

    def wake_on(self, wake: asyncio.Future[None] | None) -> None:
        """Set a future that is done when there is something new.

        A reader of several choices uses it instead of `next_output`.
        """
        self._wake = wake

    def has_news(self) -> bool:
        """Return whether there is something to take."""
        return len(self._token_ids) >= self._due_at or self.is_finished

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def take(self) -> RequestOutput:
        """Return the output so far; raises the error that the request failed with."""
        if self._error is not None:
            raise self._error
        text = self._detokenizer.text if self._detokenizer is not None else ""
        tokens = self._token_ids
        is_delta = self.output_kind is RequestOutputKind.DELTA
        self.metrics.num_generation_tokens = len(tokens)
        first = self._taken_tokens if is_delta else 0
        new_text, new_tokens = text[self._taken_text :] if is_delta else text, tokens[first:]
        completion = CompletionOutput(
            self.index, new_text, new_tokens, self._finish_reason, self._stop_reason
        )
        if self._request.sampling.logprobs is not None:
            for i in range(self._taken_tokens, len(tokens)):
                self._cumulative_logprob += self._logprobs[i][tokens[i]].logprob
            completion.logprobs = self._logprobs[first : len(tokens)]
            completion.cumulative_logprob = self._cumulative_logprob
        self._taken_tokens, self._taken_text = len(tokens), len(text)
        self._due_at = len(tokens) + self._interval
        return self.request_output([completion], is_first=not first)

    def request_output(
        self, completions: list[CompletionOutput], *, is_first: bool
    ) -> RequestOutput:
        """Return the reader's output with these completions.

        is_first: the reader has not received the prompt's logprobs yet.
        """
        output = RequestOutput(
            self.request_id,
            self._request.prompt,
            self._request.prompt_token_ids,
            completions,
            self._finish_reason is not None,
            self.metrics,
            self._num_cached,
        )
        if self._request.sampling.prompt_logprobs is not None and is_first:
            output.prompt_logprobs = self._prompt_logprobs
        return output
