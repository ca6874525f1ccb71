"""Requests to the engine as the server makes them.

There is one request for each prompt. Its choices are read separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.output.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from sidestep.frontend.output.request_state import RequestState, Sink
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.pooling_params import PoolingParams
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.transport.step import Float32


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Arguments of AsyncLLM's methods besides a prompt and parameters."""

    request_id: str
    priority: int
    cache_salt: str | None
    num_public_tokens: int
    deadline_s: float | None


class Reader(Protocol):
    """Reader of the outputs of one choice; see RequestState."""

    async def next_output(self) -> RequestOutput:
        """Return the next output. Raises the error with which the request failed."""

    async def push(self, sink: Sink) -> None:
        """Push outputs to the sink until it is not ready or the request has ended."""


class EngineCall(Protocol):
    """One request to the engine. It is sent when its first choice is opened."""

    def open(self, index: int) -> AbstractAsyncContextManager[Reader]:
        """Return the reader of the choice with this index, as a context; its exit ends the choice.

        Raises the errors of AsyncLLM's methods.
        """


class PoolingCall:
    """Call for a vector, which is its only choice."""

    def __init__(
        self, llm: AsyncLLM, prompt: Sequence[int], params: PoolingParams, options: CallOptions
    ) -> None:
        self._llm = llm
        self._params = params
        self._start = partial(llm.start_pooling, prompt, params, **vars(options))
        self._state: RequestState | None = None

    @asynccontextmanager
    async def open(self, index: int) -> AsyncGenerator[Reader, None]:
        """Return the reader of the only choice; see EngineCall."""
        self._state = await self._start()
        try:
            yield self._state
        finally:
            self._llm.leave(self._state)

    def result(self, output: RequestOutput) -> Float32:
        """Return the vector, once the reader has given this last output. Raises RequestError."""
        assert self._state is not None, "nothing has been opened"
        return self._llm.pooled(output, self._state, self._params).outputs.data


def make_call(
    llm: AsyncLLM,
    prompt: Sequence[int],
    params: SamplingParams,
    beam_search: BeamSearchParams | None,
    options: CallOptions,
) -> EngineCall:
    """Return the call for a prompt. beam_search: parameters of a search, instead of sampling."""
    if beam_search is not None:
        return _WholeCall(partial(_search, llm, prompt, beam_search, options))
    if params.ranks_choices:
        return _WholeCall(partial(_last, llm, prompt, params, options))
    return (
        _PlainCall(llm, prompt, params, options)
        if params.n == 1
        else _SharedCall(llm, prompt, params, options)
    )


class _PlainCall:
    """Call with one choice."""

    def __init__(
        self, llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, options: CallOptions
    ) -> None:
        self._llm = llm
        self._start = partial(llm.start, prompt, params, **vars(options))

    @asynccontextmanager
    async def open(self, index: int) -> AsyncGenerator[Reader, None]:
        (state,) = await self._start()
        try:
            yield state
        finally:
            self._llm.leave(state)


class _SharedCall:
    """Call with several choices, each of which ends by itself."""

    def __init__(
        self, llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, options: CallOptions
    ) -> None:
        self._llm = llm
        self._start = partial(llm.start, prompt, params, **vars(options))
        self._sending: asyncio.Task[list[RequestState]] | None = None

    @asynccontextmanager
    async def open(self, index: int) -> AsyncGenerator[Reader, None]:
        if self._sending is None:
            self._sending = asyncio.create_task(self._start())
        sending = self._sending
        try:
            # A cancelled reader must not cancel the request of the other readers.
            yield (await asyncio.shield(sending))[index]
        finally:
            if sending.done():
                self._leave(index, sending)
            else:
                sending.add_done_callback(lambda sent: self._leave(index, sent))

    def _leave(self, index: int, sent: asyncio.Task[list[RequestState]]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            self._llm.leave(sent.result()[index])


class _WholeCall:
    """Call whose choices are all known only at the end.

    It ends when the last reader leaves.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, RequestOutput]]) -> None:
        self._run = run
        self._running: asyncio.Task[RequestOutput] | None = None
        self._num_readers = 0

    @asynccontextmanager
    async def open(self, index: int) -> AsyncGenerator[Reader, None]:
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        self._num_readers += 1
        try:
            yield _WholeReader(self._running, index)
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._running.cancel()


class _WholeReader:
    """Reader with one output, the last one."""

    def __init__(self, running: asyncio.Task[RequestOutput], index: int) -> None:
        self._running = running
        self._index = index

    async def next_output(self) -> RequestOutput:
        return _choice_of(await asyncio.shield(self._running), self._index)

    async def push(self, sink: Sink) -> None:
        raise AssertionError("nothing follows the last output")


def _choice_of(output: RequestOutput, index: int) -> RequestOutput:
    """Return the output of one choice.

    The first choice's metrics count all tokens of the request, which are more than those of its
    choices; the others' metrics count no tokens.
    """
    # A search that was aborted may have found fewer texts.
    ended = CompletionOutput(index, "", [], "abort")
    completion = output.outputs[index] if index < len(output.outputs) else ended
    metrics = output.metrics if index == 0 else output.metrics.without_tokens()
    return replace(output, outputs=[completion], metrics=metrics)


async def _last(
    llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, options: CallOptions
) -> RequestOutput:
    async for output in llm.generate(prompt, params, **vars(options)):
        pass
    return output


async def _search(
    llm: AsyncLLM, prompt: Sequence[int], params: BeamSearchParams, options: CallOptions
) -> RequestOutput:
    found: BeamSearchOutput = await llm.beam_search(prompt, params, **vars(options))
    completions = [
        CompletionOutput(
            i,
            s.text,
            s.tokens[len(found.prompt_token_ids) :],
            s.finish_reason,
            s.stop_reason,
            cumulative_logprob=s.cum_logprob,
        )
        for i, s in enumerate(found.sequences)
    ]
    return RequestOutput(
        found.request_id,
        found.prompt,
        found.prompt_token_ids,
        completions,
        True,
        found.metrics,
        found.num_cached_tokens,
    )
