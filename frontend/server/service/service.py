"""State that the routes share: the engine, the model's names and the running requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
from starlette.requests import Request

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.async_pooling import NO_TEXT
from sidestep.frontend.api.request_checks import check_task
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.server.observe.figures import Figures
from sidestep.frontend.server.observe.metrics import ServerMetrics
from sidestep.frontend.server.schemas.fields import ClientFields
from sidestep.frontend.server.schemas.protocol import CompletionDetails, PromptDetails, Usage
from sidestep.frontend.server.service.call import (
    CallOptions,
    EngineCall,
    PoolingCall,
    Reader,
    make_call,
)
from sidestep.frontend.server.service.public_prefixes import PublicPrefixes
from sidestep.frontend.server.service.queue_events import Queue
from sidestep.frontend.server.transport.errors import RETRY_AFTER, ApiError, refused, too_long
from sidestep.frontend.server.transport.guard import CACHE_SALT, TENANT
from sidestep.frontend.server.transport.large_bodies import MOST_VALUES, LargeBodies
from sidestep.frontend.server.transport.request_log import LOGGED
from sidestep.ipc.common.errors import PromptTooLongError, QueueFullError, ValidationError
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.pooling_params import PoolingParams
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from sidestep.ipc.transport.step import Float32

if TYPE_CHECKING:
    from sidestep.frontend.server.observe.tracing import RequestTrace, Tracing

DEADLINE_HEADER = "x-deadline-ms"
"""Header with the milliseconds after which a request ends with the tokens that it has."""
_ANYBODY = "anonymous"
"""Tenant of all requests to a server without keys."""
_OTHER_VALUES = 4096
"""JSON values that a body may hold beside the token ids of the longest prompt."""
_LAST_WORDS_S = 1.0
"""Seconds in which aborted requests can send their last outputs."""


@dataclass(frozen=True, eq=False)
class Choice:
    """One completion that the engine makes for a client."""

    index: int
    request_id: str
    """Id of the request to the engine, which the choices of one prompt share."""
    params: SamplingParams
    call: EngineCall
    index_in_call: int
    """Index of the choice among those of its call."""
    tenant: str
    """Tenant for which the choice is counted."""
    trace: RequestTrace | None

    def open(self) -> AbstractAsyncContextManager[Reader]:
        """Return the reader of the choice's outputs, as a context inside its `tally`.

        Raises the errors of AsyncLLM.generate.
        """
        return self.call.open(self.index_in_call)


class Tally:
    """Context that counts one choice while it runs, however it ends."""

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
        """Count an output of the choice.

        Tokens that come together, from one step or to a slow reader, share the time since the
        tokens before. So the histogram counts each token once, and its sum is the time that
        passed, whether or not steps give several tokens.
        """
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
        reason = "abort"  # the client has gone, unless another reason is found below
        if isinstance(error, QueueFullError):
            reason = "rejected"
        elif isinstance(error, Exception):
            reason = "error"
        elif self._last is not None and self._last.finished:
            reason = self._last.outputs[0].finish_reason or reason
        self._service.choice_ends(self._choice, self._last, reason)


class Service:
    """One process of a server, and its connection to the engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        args: ServerArgs,
        names: Sequence[str],
        tracing: Tracing | None = None,
        public_prefixes: PublicPrefixes | None = None,
    ) -> None:
        """Make a service that takes requests.

        names: the model's names in requests; the first one is its name in answers. tracing: makes
        spans. public_prefixes: beginnings of prompts whose blocks tenants share.
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
        self.is_ending = False
        """Whether the server's end has begun, so that no further clients should come."""
        self.is_draining = False
        """Whether new requests are refused."""
        self.gather: Callable[[], Awaitable[Figures]] | None = None
        """Function that collects the figures of all processes of the server, if it has several."""
        self._running: set[Choice] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return (
            f"Service({self.names[0]!r}, {len(self._running)} running, draining={self.is_draining})"
        )

    async def figures(self) -> Figures:
        """Return the figures of all processes of this server."""
        return self.own_figures() if self.gather is None else await self.gather()

    def own_figures(self) -> Figures:
        """Return the figures of this process."""
        return self.metrics.figures(
            self.llm.num_tokens_received,
            self.llm.recovery,
            self.llm.num_refused_peers,
            self.llm.predicted_ttft_s,
        )

    # Checks of requests.

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer.

        Raises ApiError (404) for the name of another model.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: {name!r} is not served here; {', '.join(map(repr, self.names))} is",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if name is None else name

    def check_task(self, *, pools: bool) -> None:
        """Raise ApiError (400) for a route that this kind of engine does not serve.

        pools: whether the route is for vectors; else it generates text.
        """
        try:
            check_task(self.llm.pooling, pools=pools)
        except ValidationError as error:
            raise ApiError(400, str(error), code="unsupported_task") from None

    def check_admission(self) -> None:
        """Raise ApiError (503) when the server takes no more requests."""
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
        """Return a prompt's token ids.

        Raises ApiError (400) if the text's length shows that it cannot fit, and with `must_fit`
        also if it does not fit. field: the request's field that the error names.
        """
        try:
            return await self.llm.tokenize(
                text, add_special_tokens=add_special_tokens, must_fit=must_fit
            )
        except PromptTooLongError as error:
            raise too_long(
                field, self.llm.prompt_limit, error.num_tokens, at_least=error.at_least
            ) from None

    def check_length(self, field: str, ids: Sequence[int]) -> None:
        """Raise ApiError (400) for a prompt that does not fit, with output if there is any."""
        if len(ids) > self.llm.prompt_limit.longest:
            raise too_long(field, self.llm.prompt_limit, len(ids))

    def _check_priority(self, priority: int | None) -> int:
        """Return the priority, 0 if none is given.

        Raises ApiError for a priority that would have no effect.
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
        """Return all choices of a request, prompt by prompt.

        base: the answer's id, with which the engine's request ids begin. client: the request. n:
        number of choices of each prompt. Raises ApiError.
        """
        n = n or 1
        self.metrics.histograms["request_params_n"].observe(float(n))
        params = msgspec.structs.replace(params, n=n)
        calls = [
            (options.request_id, make_call(self.llm, prompt, params, beam_search, options))
            for prompt, options in self._options(http, base, prompts, client, n)
        ]
        return self._choices(http, client, calls, params)

    def pooling_choices(
        self,
        http: Request,
        base: str,
        prompts: Sequence[Sequence[int]],
        params: PoolingParams,
        client: ClientFields,
    ) -> list[Choice]:
        """Return the only choice of each prompt of a request for vectors; see `choices`."""
        calls = [
            (options.request_id, PoolingCall(self.llm, prompt, params, options))
            for prompt, options in self._options(http, base, prompts, client, 1)
        ]
        return self._choices(http, client, calls, NO_TEXT)

    def _options(
        self,
        http: Request,
        base: str,
        prompts: Sequence[Sequence[int]],
        client: ClientFields,
        n: int,
    ) -> Iterator[tuple[Sequence[int], CallOptions]]:
        """Yield each prompt with the options of its call. Raises ApiError."""
        http.scope.get(LOGGED, {}).update({"response_id": base, **client.notes})
        deadline_s = _deadline(http, client.deadline_ms)
        priority, salt = self._check_priority(client.priority), client.cache_salt
        for i, prompt in enumerate(prompts):
            yield (
                prompt,
                CallOptions(
                    request_id=f"{base}-{i * n}",
                    priority=priority,
                    cache_salt=self._salt(http, salt),
                    # A request with a salt of its own asks for more isolation than the operator
                    # does, so it shares no public prefixes.
                    num_public_tokens=0
                    if salt is not None
                    else self.public_prefixes.length(prompt),
                    deadline_s=deadline_s,
                ),
            )

    def _choices(
        self,
        http: Request,
        client: ClientFields,
        calls: Sequence[tuple[str, EngineCall]],
        params: SamplingParams,
    ) -> list[Choice]:
        """Return the choices of calls, each with the id of its request to the engine."""
        tenant = http.scope.get(TENANT, _ANYBODY)
        trace = (
            None
            if self._tracing is None
            else self._tracing.begin(self.names[0], http.headers, client.notes)
        )
        return [
            Choice(i * params.n + j, request_id, params, call, j, tenant, trace)
            for i, (request_id, call) in enumerate(calls)
            for j in range(params.n)
        ]

    def _salt(self, http: Request, salt: str | None) -> str | None:
        """Return the salt of the request's cached blocks, which depends on its key.

        Users of different keys share no cached prefixes, because the time of an answer would reveal
        the prompts of other users.
        """
        of_key: str | None = http.scope.get(CACHE_SALT)
        return salt if of_key is None else f"{of_key}:{salt or ''}"

    # Running.

    def request_ids(self, tenant: str) -> set[str]:
        """Return the ids of this process's running requests of a tenant."""
        return {choice.request_id for choice in self._running if choice.tenant == tenant}

    def tally(self, choice: Choice) -> Tally:
        """Return a context that counts one choice."""
        return Tally(self, choice)

    def choice_begins(self, choice: Choice) -> None:
        """Note that a client waits for a choice from now on."""
        self._running.add(choice)
        self.metrics.tenants[choice.tenant].running += 1
        self._idle.clear()

    def choice_ends(self, choice: Choice, last: RequestOutput | None, reason: str) -> None:
        """Note that a choice has ended. last: its last output, if it gave any."""
        self._running.remove(choice)
        self.metrics.choice_ended(choice.tenant, last, reason, is_first=choice.index_in_call == 0)
        if choice.trace is not None:
            choice.trace.choice_ended(choice.request_id, last, reason)
        if reason == "rejected":
            self.metrics.rejections["queue_full"] += 1
        if not self._running:
            self._idle.set()

    async def whole(self, choices: Sequence[Choice]) -> list[RequestOutput]:
        """Return the last outputs of all choices; raise the first failure, which ends them all."""
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

    def result_of(self, choice: Choice, output: RequestOutput) -> Float32:
        """Return the vector of a choice of `pooling_choices`. Raises RequestError if it has none.

        output: the choice's last one.
        """
        assert isinstance(choice.call, PoolingCall)
        return choice.call.result(output)

    async def stats(self) -> dict[int, dict[str, float]]:
        """Return the stats of each replica whose core answers.

        Raises EngineStalledError if none does.
        """
        return await self.llm.get_stats_by_replica()

    # Ending.

    @property
    def num_running(self) -> int:
        """Number of requests to the engine that clients of this process wait for."""
        return len({choice.request_id for choice in self._running})

    async def drain(self, grace_s: float, timeout_s: float) -> int:
        """Refuse new requests after `grace_s` seconds, and wait for the running ones.

        Abort those that still run `timeout_s` seconds later, and return their number.
        """
        self.is_ending = True
        await asyncio.sleep(grace_s)
        self.is_draining, num_aborted = True, 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            num_aborted = self.num_running
            await self.llm.abort({choice.request_id for choice in self._running})
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._idle.wait()
            except TimeoutError:
                pass  # a client does not read; the caller closes its connection next
        return num_aborted


def new_id(kind: str) -> str:
    """Return a new id for a request, for its answer and for the engine's records."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage_of(outputs: Sequence[RequestOutput], n: int) -> Usage:
    """Return the tokens of all choices; a prompt counts once for its `n` choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::n])
    cached = sum(output.num_cached_tokens or 0 for output in outputs[::n])
    generated = sum(output.metrics.num_generation_tokens for output in outputs)
    return Usage(prompt, generated, prompt + generated, PromptDetails(cached), _details_of(outputs))


def _details_of(outputs: Sequence[RequestOutput]) -> CompletionDetails | msgspec.UnsetType:
    """Return the accepted and rejected drafts of the choices; UNSET if none are known."""
    known = [
        (metrics.num_draft_tokens, metrics.num_accepted_tokens)
        for metrics in (output.metrics for output in outputs)
        if metrics.num_draft_tokens is not None and metrics.num_accepted_tokens is not None
    ]
    if not known:
        return msgspec.UNSET
    accepted = sum(accepted for _, accepted in known)
    return CompletionDetails(accepted, sum(drafted for drafted, _ in known) - accepted)


def _deadline(http: Request, field: int | None) -> float | None:
    """Return the seconds until the deadline: the smaller value of the field and the header.

    Return None if neither is given. Raises ApiError.
    """
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
