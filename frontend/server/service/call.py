"""Requests to the engine as the server makes them: one for each prompt, whose choices are read one
by one.
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
from sidestep.ipc.params.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What AsyncLLM's methods take besides a prompt and parameters."""

    request_id: str
    priority: int
    cache_salt: str | None
    num_public_tokens: int
    deadline_s: float | None


class Reader(Protocol):
    """What gives the outputs of one choice; see RequestState."""

    async def next_output(self) -> RequestOutput:
        """The next one. Raises what the request failed with."""

    async def push(self, sink: Sink) -> None:
        """Pushes outputs until the sink is not ready or the request has ended."""


class EngineCall(Protocol):
    """One request to the engine; the first choice that is opened sends it."""

    def open(self, place: int) -> AbstractAsyncContextManager[Reader]:
        """The reader of one choice; leaving it ends the choice. Raises what AsyncLLM's methods
        raise.
        """


def make_call(
    llm: AsyncLLM,
    prompt: Sequence[int],
    params: SamplingParams,
    beam_search: BeamSearchParams | None,
    options: CallOptions,
) -> EngineCall:
    """The call for a prompt; beam_search: instead of sampling."""
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
    """Of one choice."""

    def __init__(
        self, llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, options: CallOptions
    ) -> None:
        self._llm = llm
        self._start = partial(llm.start, prompt, params, **vars(options))

    @asynccontextmanager
    async def open(self, place: int) -> AsyncGenerator[Reader, None]:
        (state,) = await self._start()
        try:
            yield state
        finally:
            self._llm.leave(state)


class _SharedCall:
    """Of several choices, each of which goes on and ends by itself."""

    def __init__(
        self, llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, options: CallOptions
    ) -> None:
        self._llm = llm
        self._start = partial(llm.start, prompt, params, **vars(options))
        self._sending: asyncio.Task[list[RequestState]] | None = None

    @asynccontextmanager
    async def open(self, place: int) -> AsyncGenerator[Reader, None]:
        if self._sending is None:
            self._sending = asyncio.create_task(self._start())
        sending = self._sending
        try:
            yield (await asyncio.shield(sending))[place]  # for the others it goes on
        finally:
            if sending.done():
                self._leave(place, sending)
            else:
                sending.add_done_callback(lambda sent: self._leave(place, sent))

    def _leave(self, place: int, sent: asyncio.Task[list[RequestState]]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            self._llm.leave(sent.result()[place])


class _WholeCall:
    """Of choices that are known all together, at the end; it ends when the last of them is left."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, RequestOutput]]) -> None:
        self._run = run
        self._running: asyncio.Task[RequestOutput] | None = None
        self._num_readers = 0

    @asynccontextmanager
    async def open(self, place: int) -> AsyncGenerator[Reader, None]:
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        self._num_readers += 1
        try:
            yield _WholeReader(self._running, place)
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._running.cancel()


class _WholeReader:
    """Has one output, the last."""

    def __init__(self, running: asyncio.Task[RequestOutput], place: int) -> None:
        self._running = running
        self._place = place

    async def next_output(self) -> RequestOutput:
        return _choice_of(await asyncio.shield(self._running), self._place)

    async def push(self, sink: Sink) -> None:
        raise AssertionError("nothing follows the last output")


def _choice_of(output: RequestOutput, place: int) -> RequestOutput:
    """One choice's. The tokens of the whole request, which are more than those of its choices,
    count once.
    """
    ended = CompletionOutput(place, "", [], "abort")  # a search that was ended has found nothing
    completion = output.outputs[place] if place < len(output.outputs) else ended
    metrics = output.metrics if place == 0 else replace(output.metrics, num_generation_tokens=0)
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
