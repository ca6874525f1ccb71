"""What the routes share: the engine, its names, its requests that run for clients, and whether it
still takes any.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
from starlette.requests import Request

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.server.observe.figures import Figures
from sidestep.frontend.server.observe.metrics import ServerMetrics
from sidestep.frontend.server.schemas.fields import ClientFields
from sidestep.frontend.server.schemas.protocol import PromptDetails, Usage
from sidestep.frontend.server.service.call import CallOptions, EngineCall, Reader, make_call
from sidestep.frontend.server.service.public_prefixes import PublicPrefixes
from sidestep.frontend.server.service.queue_events import Queue
from sidestep.frontend.server.transport.errors import RETRY_AFTER, ApiError, refused, too_long
from sidestep.frontend.server.transport.guard import CACHE_SALT, TENANT
from sidestep.frontend.server.transport.large_bodies import MOST_VALUES, LargeBodies
from sidestep.frontend.server.transport.request_log import LOGGED
from sidestep.ipc.common.errors import PromptTooLongError, QueueFullError
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from sidestep.frontend.server.observe.tracing import RequestTrace, Tracing

DEADLINE_HEADER = "x-deadline-ms"
_ANYBODY = "anonymous"
"""The tenant of a server without keys."""
_OTHER_VALUES = 4096
"""JSON values that a body may hold beside the token ids of the longest prompt."""
_LAST_WORDS_S = 1.0
"""For what requests that are ended still have to say."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One completion to make."""

    index: int
    request_id: str
    """Of the request to the engine."""
    params: SamplingParams
    call: EngineCall
    place: int
    """Which of the call's it is."""
    tenant: str
    """Whose it is, for the counts."""
    trace: RequestTrace | None

    def open(self) -> AbstractAsyncContextManager[Reader]:
        """What reads its outputs, within its `tally`. Raises what AsyncLLM.generate raises."""
        return self.call.open(self.place)


class Tally:
    """The counts of one choice while it runs, from `with` to its end, however that comes."""

    def __init__(self, service: Service, choice: Choice) -> None:
        self._service = service
        self._choice = choice
        self._gaps = service.metrics.token_gaps
        self._last_gaps, self._last_ttfts = service.metrics.last_gaps, service.metrics.last_ttfts
        self._last: RequestOutput | None = None
        self._last_ts = 0.0
        self._told = 0
        self._is_streamed = choice.params.output_kind == RequestOutputKind.DELTA

    def __enter__(self) -> Self:
        self._service.choice_begins(self._choice)
        return self

    def note(self, output: RequestOutput) -> None:
        """One more output."""
        self._last, metrics = output, output.metrics
        if (now := metrics.last_token_ts) is not None:
            new = metrics.num_generation_tokens - self._told
            if not self._told:  # the first output may bring several tokens
                self._last_ttfts.add(metrics.first_token_latency or 0.0)
                self._last_ts, new = metrics.first_token_ts or now, new - 1
            if new > 0 and self._is_streamed:
                gap = (now - self._last_ts) / new
                self._gaps.observe(gap, new)
                self._last_gaps.add(gap)
            self._last_ts, self._told = now, metrics.num_generation_tokens

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = "abort"  # the client has gone, unless there is something else to say
        if isinstance(error, QueueFullError):
            reason = "rejected"
        elif isinstance(error, Exception):
            reason = "error"
        elif self._last is not None and self._last.finished:
            reason = self._last.outputs[0].finish_reason or reason
        self._service.choice_ends(self._choice, self._last, reason)


class Service:
    """One server's hold on one engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        args: ServerArgs,
        names: Sequence[str],
        tracing: Tracing | None = None,
        public_prefixes: PublicPrefixes | None = None,
    ) -> None:
        """names: what requests may call the model; the first is what answers call it. tracing:
        makes spans. public_prefixes: what prompts may begin with and share between tenants.
        """
        self.llm = llm
        self.args = args
        self.names = tuple(names)
        self.metrics = ServerMetrics()
        self._tracing = tracing
        self.public_prefixes = public_prefixes or PublicPrefixes([])
        self.large = LargeBodies(max(MOST_VALUES, llm.max_model_len + _OTHER_VALUES))
        self.queue = Queue(llm)
        self.started = int(time.time())
        self.is_draining = False
        self.gather: Callable[[], Awaitable[Figures]] | None = None
        """Asks all of the server's processes, where there are several."""
        self._running: set[Choice] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return (
            f"Service({self.names[0]!r}, {len(self._running)} running, draining={self.is_draining})"
        )

    async def figures(self) -> Figures:
        """What all processes of this server have counted."""
        return self.own_figures() if self.gather is None else await self.gather()

    def own_figures(self) -> Figures:
        """What this process has counted."""
        return self.metrics.figures(self.llm.num_tokens_received)

    # What a request must pass.

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer. Raises ApiError (404) for another model's."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; {', '.join(map(repr, self.names))} is",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if name is None else name

    def check_admission(self) -> None:
        """Raises ApiError (503) when the server takes no more requests."""
        if self.is_draining:
            self.metrics.rejections["draining"] += 1
            raise ApiError(
                503,
                "the server is shutting down",
                kind="server_error",
                code="draining",
                headers={**RETRY_AFTER, "connection": "close"},
            )

    async def tokenize(
        self, field: str, text: str, *, add_special_tokens: bool, must_fit: bool = True
    ) -> list[int]:
        """Return a prompt's token ids. Raises ApiError (400) if its length shows that it cannot
        fit, and with `must_fit` also if it leaves no room for output.
        """
        try:
            return await self.llm.tokenize(
                text, add_special_tokens=add_special_tokens, must_fit=must_fit
            )
        except PromptTooLongError as error:
            raise too_long(
                field, self.llm.max_model_len, error.num_tokens, at_least=error.at_least
            ) from None

    def check_length(self, field: str, ids: Sequence[int]) -> None:
        """Raises ApiError (400) for a prompt that leaves no room for output."""
        if len(ids) + 1 > self.llm.max_model_len:
            raise too_long(field, self.llm.max_model_len, len(ids))

    def _check_priority(self, priority: int | None) -> int:
        """Return the priority, 0 if none is given. Raises ApiError for a priority that would do
        nothing.
        """
        if priority and self.llm.scheduling_policy != "priority":
            raise refused(
                "priority",
                "has no effect on this server, which takes requests in the order in which they "
                "come; it must be started with --scheduling-policy priority",
                "unsupported_field",
            )
        return priority or 0

    def choices(
        self,
        http: Request,
        base: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        client: ClientFields,
        *,
        n: int | None = None,
        beam_search: BeamSearchParams | None = None,
    ) -> list[Choice]:
        """Return all completions that a request asks for, prompt by prompt. client: the request."""
        http.scope.get(LOGGED, {}).update({"response_id": base, **client.notes})
        deadline_s, n = _deadline(http, client.deadline_ms), n or 1
        priority, salt = self._check_priority(client.priority), client.cache_salt
        # Who brings a salt asks for more isolation than the operator does, and gets it.
        public = [
            0 if salt is not None else self.public_prefixes.length(prompt) for prompt in prompts
        ]
        salt = self._salt(http, salt)
        self.metrics.histograms["request_params_n"].observe(float(n))
        params = msgspec.structs.replace(params, n=n)
        tenant = http.scope.get(TENANT, _ANYBODY)
        trace = (
            None
            if self._tracing is None
            else self._tracing.begin(self.names[0], http.headers, client.notes)
        )
        made: list[Choice] = []
        for i, prompt in enumerate(prompts):
            options = CallOptions(
                request_id=f"{base}-{i * n}",
                priority=priority,
                cache_salt=salt,
                num_public_tokens=public[i],
                deadline_s=deadline_s,
            )
            call = make_call(self.llm, prompt, params, beam_search, options)
            made += [
                Choice(i * n + j, options.request_id, params, call, j, tenant, trace)
                for j in range(n)
            ]
        return made

    def _salt(self, http: Request, salt: str | None) -> str | None:
        """Users of different keys share no cached prefixes: how fast an answer comes would tell
        what another asked.
        """
        of_key: str | None = http.scope.get(CACHE_SALT)
        return salt if of_key is None else f"{of_key}:{salt or ''}"

    # Running.

    def request_ids(self, tenant: str) -> set[str]:
        """Return the engine's names of this process's running requests of a tenant."""
        return {choice.request_id for choice in self._running if choice.tenant == tenant}

    def tally(self, choice: Choice) -> Tally:
        """Counts one choice."""
        return Tally(self, choice)

    def choice_begins(self, choice: Choice) -> None:
        """A client waits for it from now on."""
        self._running.add(choice)
        self.metrics.tenants[choice.tenant].running += 1
        self._idle.clear()

    def choice_ends(self, choice: Choice, last: RequestOutput | None, reason: str) -> None:
        """Nobody waits for it any more. `last` is its last output, if it gave any."""
        self._running.remove(choice)
        self.metrics.choice_ended(choice.tenant, last, reason, is_first=choice.place == 0)
        if choice.trace is not None:
            choice.trace.choice_ended(choice.request_id, last, reason)
        if reason == "rejected":
            self.metrics.rejections["queue_full"] += 1
        if not self._running:
            self._idle.set()

    async def whole(self, choices: Sequence[Choice]) -> list[RequestOutput]:
        """The last outputs of all choices; the first failure ends them all, and is raised."""
        tasks = [asyncio.create_task(self._last(choice)) for choice in choices]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _last(self, choice: Choice) -> RequestOutput:
        with self.tally(choice) as tally:
            async with choice.open() as reader:
                output = await reader.next_output()
            tally.note(output)
        return output

    async def stats(self) -> dict[int, dict[str, float]]:
        """Return the stats of each replica whose core answers. Raises EngineStalledError if none
        does.
        """
        return await self.llm.get_stats_by_replica()

    # Ending.

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests and waits for those that run; ends those that have not within the
        time.
        """
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            await self.llm.abort({choice.request_id for choice in self._running})
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._idle.wait()
            except TimeoutError:
                pass  # a client that does not read: its connection is closed next


def new_id(kind: str) -> str:
    """A request's name, in its answer and in the engine's records."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage_of(outputs: Sequence[RequestOutput], n: int) -> Usage:
    """Tokens of all choices; those of a prompt count once for its `n` choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::n])
    cached = sum(output.num_cached_tokens or 0 for output in outputs[::n])
    generated = sum(output.metrics.num_generation_tokens for output in outputs)
    return Usage(prompt, generated, prompt + generated, PromptDetails(cached))


def _deadline(http: Request, field: int | None) -> float | None:
    """Seconds; the sooner of what the field and the header say."""
    header = http.headers.get(DEADLINE_HEADER)
    if header is not None:
        if (
            not header.isascii()
            or not header.isdigit()
            or len(header) > 10
            or not 1 <= int(header) < 2**31
        ):
            raise refused(
                DEADLINE_HEADER, f"must be a whole number of milliseconds, not {header!r}"
            )
        field = min(int(header), field or 2**31)
    return None if field is None else field / 1000
