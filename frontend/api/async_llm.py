"""AsyncLLM: the engine's asynchronous interface to applications."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from sidestep.frontend.api.async_pooling import AsyncPooling
from sidestep.frontend.api.engine_control import EngineControl
from sidestep.frontend.api.engine_view import EngineView
from sidestep.frontend.api.request_checks import check_priority, check_queue, check_task
from sidestep.frontend.api.startup import (
    load_tokenizer,
    open_channels,
    seed_of_frontend,
    warn_of_shorter_length,
)
from sidestep.frontend.input.input_processor import InputProcessor, ProcessedRequest
from sidestep.frontend.input.logits_controls import check_text
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.prompts import ChatPrompt, Prompt
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.beam_outputs import beam_search_output
from sidestep.frontend.output.choices import Choices
from sidestep.frontend.output.output_processor import Delivery, OutputProcessor
from sidestep.frontend.output.outputs import BeamSearchOutput, RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.frontend.placement.make_placer import make_placer
from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.frontend.vllm.vllm_names import RefusesVllmMethods, takes_vllm_arguments
from sidestep.ipc.common.errors import EngineDeadError, ValidationError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.processes.core_args import Invitation
from sidestep.ipc.transport.messages import AddRequest, pack_ids

_GRACE_S = 0.25
"""Seconds after a request's deadline until its frontend ends it, if the core has not."""


class AsyncLLM(AsyncPooling, EngineView, EngineControl, RefusesVllmMethods):
    """An engine with an asyncio interface.

    Several engines may live in one process; each belongs to one event loop. Starting blocks until
    the engine serves, and may happen outside any event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        invitation: Invitation | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Start an engine, or join the one that sent an invitation.

        meanwhile: work of the caller, such as imports, that is called while the engine's processes
        start; what it raises ends them. Raises EngineStartError, in one line, if the engine cannot
        start.
        """
        # A weak reference, so that an engine without other references is collected and shut down.
        self_ref = weakref.ref(self)
        self._config = config
        self._outputs = OutputProcessor(lambda handles: _abort(self_ref, handles))
        placer = make_placer(config)
        channels, line = open_channels(config, invitation, placer)
        self._replicas = ReplicaSet(
            config,
            self._outputs,
            channels,
            line=line,
            dead=invitation.dead if invitation is not None else None,
            absent=invitation.absent if invitation is not None else (),
            placer=placer,
        )
        self._home = self._replicas.home
        self._finalizer = weakref.finalize(self, _close, self._replicas)
        try:
            if invitation is None:
                self._replicas.start_cores()
            self._tokenizer = load_tokenizer(config)  # while the cores start
            if meanwhile is not None:
                meanwhile()
            self._replicas.wait_ready()
            if invitation is None:
                warn_of_shorter_length(config, self._replicas.max_model_len)
        except BaseException:
            self._finalizer()
            raise
        self._inputs = InputProcessor(
            self._tokenizer,
            vocab_size=config.spec.vocab_size,
            max_model_len=self._replicas.max_model_len,
            processors=config.model.processor_names,
            defaults=config.sampling_defaults,
            seed=seed_of_frontend(config, invitation),
            pools=config.spec.pooling is not None,
        )
        self._limits = config.frontend
        self._preparing: dict[str, bool] = {}
        """Requests that are being checked and tokenised, by id.

        The value says whether a request is still wanted.
        """
        self._handles = itertools.count()

    @classmethod
    @takes_vllm_arguments
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an engine with these options.

        Raises ValidationError, which names the option, or EngineStartError.
        """
        return cls(engine_args.create_engine_config())

    @classmethod
    def join(cls, invitation: str) -> Self:
        """Return a further frontend of an engine that runs already, most often in another process.

        `invitation` is the text that `invite` returned. Frontends take turns in the engine's queue.
        When a frontend ends, its requests end, and no other's. When the one that started the engine
        ends, the engine ends. Raises ValidationError, EngineStartError.
        """
        invited = Invitation.decode(invitation)
        return cls(invited.config, invited)

    async def invite(self) -> str:
        """Return a text with which one further program can `join` this engine."""
        await self._replicas.wait_serving()
        return (await self._replicas.invite()).encode()

    def __repr__(self) -> str:
        state = (
            "dead"
            if self.errored
            else "running"
            if self.is_running
            else "shut down"
            if self._home.is_here
            else "the parent process's"
        )
        return f"AsyncLLM({state}, {len(self._outputs)} requests, {self.device})"

    # Requests.

    @takes_vllm_arguments
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        num_public_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request, with all its choices.

        `prompt` is text, token ids or chat messages. Leaving the loop, cancelling the task or
        dropping the generator ends the request and frees its memory. `priority` (lowest first)
        counts with scheduling_policy='priority'. Requests share cached prefixes only with the same
        `cache_salt`. The full blocks of the prompt's first `num_public_tokens` are an exception:
        they are shared as without a salt. After `deadline_s` seconds the request ends with
        finish_reason 'abort' and stop_reason 'deadline'.

        Raises ValidationError, which names the field; QueueFullError when too much waits already;
        RequestError when the engine refuses the request; EngineDeadError.
        """
        states = await self.start(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            num_public_tokens=num_public_tokens,
            deadline_s=deadline_s,
        )
        try:
            reader = states[0] if len(states) == 1 else Choices(states)
            finished = False
            while not finished:
                self._home.check()
                output = await reader.next_output()
                finished = output.finished
                yield output
        finally:
            self.leave(*states)

    @takes_vllm_arguments
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to a conversation.

        ChatPrompt describes the template's arguments, `generate` the other arguments and the
        errors.
        """
        prompt = ChatPrompt(
            messages=messages,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.generate(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            deadline_s=deadline_s,
        )

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        num_public_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> BeamSearchOutput:
        """Return the `beam_width` best continuations of a prompt.

        Cancelling the task ends the search. After `deadline_s` seconds it returns the continuations
        that it has. `generate` describes the other arguments and the errors.
        """
        (state,) = await self.start(
            prompt,
            self._inputs.for_beam_search(params),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            num_public_tokens=num_public_tokens,
            deadline_s=deadline_s,
            beam_search=params,
        )
        try:
            return beam_search_output(
                await state.next_output(), state.beams, params, self._tokenizer
            )
        finally:
            self.leave(state)

    async def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        num_public_tokens: int = 0,
        deadline_s: float | None = None,
        beam_search: BeamSearchParams | None = None,
        pooling: PoolingType | None = None,
    ) -> list[RequestState]:
        """Send a request and return its choices, each of which has a reader of its own.

        A reader takes the outputs of a choice by its `next_output`. The caller must `leave` each
        choice in the end. `generate` describes the arguments and the errors.
        """
        self._replicas.attach()
        check_task(self._config.spec.pooling, pools=pooling is not None)
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        self._check_id(request_id)
        check_priority(priority, self._config.scheduler.scheduling_policy)
        self._preparing[request_id] = True
        try:
            request = await self._inputs.process(
                prompt,
                sampling_params,
                priority=priority,
                cache_salt=cache_salt,
                num_public_tokens=num_public_tokens,
                deadline_s=deadline_s,
            )
        finally:
            wanted = self._preparing.pop(request_id)
        self._replicas.attach()
        num = request.sampling.n
        check_queue(
            self._limits,
            self.num_waiting,
            self.num_waiting_tokens,
            num if beam_search is None else beam_search.beam_width,
            len(request.prompt_token_ids),
        )
        # The handles must be consecutive: the engine gets only the first one.
        states = [
            RequestState(
                next(self._handles),
                request_id,
                request,
                self._tokenizer,
                self._limits.stream_interval,
                index,
            )
            for index in range(num)
        ]
        for state in states:
            state.share_prompt(states[0])
            self._outputs.add(state)
        try:
            if wanted:
                self._send(states, request, beam_search, pooling)
            else:
                self._outputs.abort([request_id])
        except BaseException:
            self.leave(*states)
            raise
        return states

    def leave(self, *states: RequestState) -> None:
        """End those of these choices that have not ended, since they are no longer read."""
        self._outputs.drop(states)

    @takes_vllm_arguments
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with finish_reason 'abort'.

        Unknown ids have ended already.
        """
        self._home.check()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._outputs.abort(ids)
        for preparing in ids:
            if preparing in self._preparing:
                self._preparing[preparing] = False

    async def check_structured_outputs(self, structure: StructuredOutputsParams) -> None:
        """Raise ValidationError, as `generate` would, for a form that cannot be compiled."""
        self._home.check()
        await self._inputs.make_grammar(structure)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False
    ) -> list[int]:
        """Return the token ids of a text as `generate` would make them.

        A long text does not block the event loop.

        Raises PromptTooLongError, before tokenising, for a text so long that it cannot fit the
        model; with `must_fit`, for every text of more tokens than `prompt_limit` allows.
        """
        self._home.check()
        return await self._inputs.tokenize(text, add_special_tokens, must_fit=must_fit)

    @property
    def prompt_limit(self) -> PromptLimit:
        """The most tokens of a prompt."""
        return self._inputs.limit

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request of this frontend is sent but not yet scheduled."""
        return self._outputs.is_waiting(request_id)

    @property
    def num_waiting(self) -> int:
        """Number of this frontend's requests that the engine has not scheduled yet."""
        return self._outputs.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens in the prompts of the waiting requests."""
        return self._outputs.num_waiting_tokens

    @property
    def num_tokens_received(self) -> int:
        """Number of tokens that this frontend has received since its start.

        Tokens of requests that are still running count too.
        """
        return self._outputs.num_tokens

    # The engine.

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that brings none.

        They follow from the model's generation_config.json; see the option `generation_config`.
        """
        return self._inputs.default_sampling

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """The sampling parameters that the model's generation_config.json sets."""
        return dict(self._config.sampling_defaults)

    def get_deliveries(self) -> list[Delivery]:
        """Return the times at which this frontend received the last steps' tokens, oldest first."""
        return self._outputs.deliveries

    def shutdown(self) -> None:
        """End the engine and every request.

        May be called twice; also happens when the program ends. Raises SidestepError in a forked
        child.
        """
        self._home.check()
        error = EngineDeadError("the engine has been shut down")
        self._outputs.fail_all(error)
        self._replicas.fail_calls(error)
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._home.is_here:  # a forked child that leaves the block ends nothing
            self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether the engine can serve."""
        return self._home.is_here and self._finalizer.alive and not self.errored

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise ValidationError("request_id", f"must be a string, not {request_id!r}")
        check_text("request_id", request_id)
        if request_id in self._outputs or request_id in self._preparing:
            raise ValidationError(
                "request_id", f"{request_id!r} is in use by a request that has not ended"
            )

    def _send(
        self,
        states: Sequence[RequestState],
        request: ProcessedRequest,
        beam_search: BeamSearchParams | None,
        pooling: PoolingType | None,
    ) -> None:
        first = states[0]
        for state in states:  # before the core can have the request: its times must come later
            state.queued()
        self._replicas.add(
            AddRequest(
                client=0,
                handle=first.handle,
                request_id=first.request_id,
                prompt_token_ids=pack_ids(request.prompt_token_ids),
                sampling=request.sampling,
                arrival=request.arrival,
                priority=request.priority,
                cache_salt=request.cache_salt,
                num_public_tokens=request.num_public_tokens,
                deadline=request.deadline,
                controls=request.controls,
                grammar=request.grammar,
                beam_search=beam_search,
                pooling=pooling,
            )
        )
        for state in states:
            if request.deadline is not None:
                self._outputs.end_at(state, request.deadline + _GRACE_S)


def _close(replicas: ReplicaSet) -> None:
    if replicas.home.is_here:
        replicas.close()


def _abort(llm: weakref.ref[AsyncLLM], handles: list[int]) -> None:
    if (alive := llm()) is not None and alive._home.is_here:
        alive._replicas.abort(handles)
