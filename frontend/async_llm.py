"""AsyncLLM: the engine as an application sees it."""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self

from sidestep.frontend.beam_search import beam_search_output
from sidestep.frontend.choices import Choices
from sidestep.frontend.controls import check_text
from sidestep.frontend.engine_client import EngineClient
from sidestep.frontend.input_processor import InputProcessor, ProcessedRequest, Prompt
from sidestep.frontend.output_processor import Delivery, OutputProcessor
from sidestep.frontend.outputs import BeamSearchOutput, RequestOutput
from sidestep.frontend.request_state import RequestState
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.beam_search_params import BeamSearchParams
from sidestep.ipc.channels import FrontendChannel, new_address, remove_address
from sidestep.ipc.config import EngineArgs, EngineConfig
from sidestep.ipc.core_args import ClientAddress, Invitation
from sidestep.ipc.errors import (
    EngineDeadError,
    EngineStalledError,
    EngineStartError,
    QueueFullError,
    ValidationError,
)
from sidestep.ipc.messages import AbortRequests, AddRequest, pack_ids
from sidestep.ipc.model_spec import resolve_model_path
from sidestep.ipc.records import RequestRecord, StepRecord, unpack_requests, unpack_steps
from sidestep.ipc.sampling_params import SamplingParams
from sidestep.ipc.structured_outputs import StructuredOutputsParams


class AsyncLLM:
    """An engine with an asyncio face. Several may live in one process; each belongs to one event loop.

    Starting blocks until the engine serves, and may happen outside any event loop.
    """

    def __init__(self, config: EngineConfig, invitation: Invitation | None = None) -> None:
        """Starts an engine, or joins the one that sent an invitation. Raises EngineStartError, in one line, if it
        cannot."""
        # Weak, so that an engine that is only forgotten can still be collected, and then shut down.
        self_ref = weakref.ref(self)
        self._config = config
        self._invited: list[ClientAddress] = []
        self._outputs = OutputProcessor(lambda handles: _abort(self_ref, handles))
        self._client = EngineClient(FrontendChannel(), self._outputs.handle, self._outputs.fail_all) \
            if invitation is None else EngineClient(FrontendChannel(invitation.address), self._outputs.handle,
                                                    self._outputs.fail_all, invitation.client)
        self._finalizer = weakref.finalize(self, _close, self._client, self._invited)
        try:
            if invitation is None:
                self._client.start_core(config)
            self._tokenizer = _load_tokenizer(config)  # while the core starts
            self._ready = self._client.wait_ready()
        except BaseException:
            self._finalizer()
            raise
        self._inputs = InputProcessor(self._tokenizer, vocab_size=config.spec.vocab_size,
                                      max_model_len=self._ready.max_model_len,
                                      processors=config.model.processor_names)
        self._limits = config.frontend
        self._preparing: dict[str, bool] = {}
        """Requests that are being checked and tokenised: whether they are still wanted."""
        self._handles = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with these options. Raises ValidationError, which names the option, or EngineStartError."""
        return cls(engine_args.create_engine_config())

    @classmethod
    def join(cls, invitation: str) -> Self:
        """A further frontend of an engine that runs already, most often in another process; `invitation` is what
        `invite` gave. Frontends take turns in the engine's queue. When one ends, its requests end, and no other's;
        when the one that started the engine ends, the engine does. Raises ValidationError, EngineStartError."""
        invited = Invitation.decode(invitation)
        return cls(invited.config, invited)

    async def invite(self) -> str:
        """Text with which one further program can `join` this engine."""
        address = new_address()
        self._invited.append(address)
        return Invitation(await self._client.connect(address), address, self._config).encode()

    def __repr__(self) -> str:
        state = "dead" if self.errored else "running" if self.is_running else "shut down"
        return f"AsyncLLM({state}, {len(self._outputs)} requests, {self._ready.device})"

    # Requests.

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                       request_id: str | None = None, *, priority: int = 0, cache_salt: str | None = None,
                       num_public_tokens: int = 0,
                       deadline_s: float | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one request, with all its choices.

        `prompt` is text, token ids or chat messages. Leaving the loop, cancelling the task or dropping the generator
        ends the request and frees its memory. `priority` (lowest first) counts with scheduling_policy='priority';
        requests share cached prefixes only with the same `cache_salt`, but for the full blocks of the prompt's first
        `num_public_tokens`, which are shared as without a salt; after `deadline_s` seconds the request ends with
        finish_reason 'abort' and stop_reason 'deadline'.

        Raises ValidationError, which names the field; QueueFullError when too much waits already; RequestError when
        the engine refuses it; EngineDeadError.
        """
        states = await self.start(prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt,
                                  num_public_tokens=num_public_tokens, deadline_s=deadline_s)
        try:
            reader = states[0] if len(states) == 1 else Choices(states)
            finished = False
            while not finished:
                output = await reader.next_output()
                finished = output.finished
                yield output
        finally:
            self.leave(*states)

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, *,
                          priority: int = 0, cache_salt: str | None = None, num_public_tokens: int = 0,
                          deadline_s: float | None = None) -> BeamSearchOutput:
        """The `beam_width` best continuations of a prompt. Cancelling the task ends the search; after `deadline_s`
        seconds it gives what it has. Other arguments and errors as of `generate`."""
        (state,) = await self.start(prompt, self._inputs.for_beam_search(params), request_id, priority=priority,
                                    cache_salt=cache_salt, num_public_tokens=num_public_tokens, deadline_s=deadline_s,
                                    beam_search=params)
        try:
            return beam_search_output(await state.next_output(), state.beams, params, self._tokenizer)
        finally:
            self.leave(state)

    async def start(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                    request_id: str | None = None, *, priority: int = 0, cache_salt: str | None = None,
                    num_public_tokens: int = 0, deadline_s: float | None = None,
                    beam_search: BeamSearchParams | None = None) -> list[RequestState]:
        """Sends a request whose choices are read one by one, each by its own reader: `next_output` of what this
        returns. Whoever calls it must `leave` each of them in the end. Arguments and errors as of `generate`."""
        self._client.attach()
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        self._check_id(request_id)
        self._preparing[request_id] = True
        try:
            request = await self._inputs.process(
                prompt, sampling_params, priority=priority, cache_salt=cache_salt,
                num_public_tokens=num_public_tokens, deadline_s=deadline_s)
        finally:
            wanted = self._preparing.pop(request_id)
        self._client.attach()
        num = request.sampling.n
        self._check_queue(num if beam_search is None else beam_search.beam_width, len(request.prompt_token_ids))
        # One after the other: the engine is told the first's handle alone.
        states = [RequestState(next(self._handles), request_id, request, self._tokenizer, self._limits.stream_interval,
                               index) for index in range(num)]
        for state in states:
            state.share_prompt(states[0])
            self._outputs.add(state)
        try:
            if wanted:
                self._send(states, request, beam_search)
            else:
                self._outputs.abort([request_id])
        except BaseException:
            self.leave(*states)
            raise
        return states

    def leave(self, *states: RequestState) -> None:
        """Nobody reads these choices any more: ends those that have not ended."""
        self._outputs.drop(states)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams end with finish_reason 'abort'. Unknown ids have ended already."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._outputs.abort(ids)
        for preparing in ids:
            if preparing in self._preparing:
                self._preparing[preparing] = False

    async def check_structured_outputs(self, structure: StructuredOutputsParams) -> None:
        """Raises ValidationError, as `generate` would, for a form that cannot be compiled."""
        await self._inputs.make_grammar(structure)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text as `generate` would make them, without holding up the event loop over a long one."""
        return await self._inputs.tokenize(text, add_special_tokens)

    @property
    def num_waiting(self) -> int:
        """This frontend's requests that the engine has not scheduled yet."""
        return self._outputs.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens of their prompts."""
        return self._outputs.num_waiting_tokens

    @property
    def num_tokens_received(self) -> int:
        """Tokens that this frontend has taken in since its start, of requests that go on too."""
        return self._outputs.num_tokens

    # The engine.

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    async def check_health(self, *, timeout_s: float = 5.0, max_stall_s: float = 30.0) -> None:
        """Returns if the engine makes progress. Raises EngineDeadError if a process of it has died, EngineStalledError
        if the core does not answer within `timeout_s` or a step takes longer than `max_stall_s`."""
        try:
            answer = await self._client.call("ping", timeout_s)
        except TimeoutError:
            raise EngineStalledError(f"the engine core has not answered for {timeout_s} s") from None
        stalled = answer["seconds_since_progress"]
        if stalled > max_stall_s:
            raise EngineStalledError(f"the steps in flight have made no progress for {stalled:.1f} s")

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the engine has died, with what it died of; never after a shutdown."""
        return await self._client.wait_dead()

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; running requests go on."""
        return bool((await self._client.call("reset_prefix_cache"))["done"])

    async def get_stats(self) -> dict[str, float]:
        """Counts of the scheduler and the KV cache, and the device's busy and idle seconds by cause; see
        engine_core.scheduler and engine_core.flight_recorder."""
        return await self._client.call("stats")

    async def get_step_records(self, since: int = 0) -> list[StepRecord]:
        """The flight recorder: the last steps that have come back, from number `since` on, oldest first. It holds some
        thousand; asking stops nothing."""
        return unpack_steps((await self._client.ask("step_records", since=since)).records)

    async def get_request_records(self, limit: int | None = None) -> list[RequestRecord]:
        """The last requests that have ended, oldest first, then all that have not, and what each of them waits for.
        With a limit at most so many that have ended, that run and that wait, which bounds what asking costs."""
        return unpack_requests((await self._client.ask("request_records", limit=limit)).records)

    def get_deliveries(self) -> list[Delivery]:
        """When this frontend took the last steps' tokens in, oldest first."""
        return self._outputs.deliveries

    def shutdown(self) -> None:
        """Ends the engine and every request. May be called twice; also happens when the program ends."""
        error = EngineDeadError("the engine has been shut down")
        self._outputs.fail_all(error)
        self._client.fail_calls(error)
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self.shutdown()

    @property
    def is_running(self) -> bool:
        """Whether it can serve."""
        return self._finalizer.alive and not self.errored

    @property
    def errored(self) -> bool:
        """Whether it has died."""
        return self._client.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What it died of."""
        return self._client.dead_error

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._ready.max_model_len

    @property
    def num_kv_blocks(self) -> int:
        """Size of the KV cache, in blocks."""
        return self._ready.num_kv_blocks

    @property
    def block_size(self) -> int:
        """Tokens that a KV block holds."""
        return self._ready.block_size

    @property
    def device(self) -> str:
        """What it runs on, for people."""
        return self._ready.device

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._ready.core_pid

    @property
    def pids(self) -> dict[str, int]:
        """Process ids: this frontend's, the core's and each worker's."""
        workers = {f"worker_{rank}": pid for rank, pid in enumerate(self._ready.worker_pids)}
        return {"frontend": os.getpid(), "core": self._ready.core_pid, **workers}

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise ValidationError("request_id", f"must be a string, not {request_id!r}")
        check_text("request_id", request_id)
        if request_id in self._outputs or request_id in self._preparing:
            raise ValidationError("request_id", f"{request_id!r} is in use by a request that has not ended")

    def _check_queue(self, num: int, num_tokens: int) -> None:
        """Raises QueueFullError. A request that is larger than the limits by itself may wait alone, or it could never
        run."""
        most, most_tokens = self._limits.max_num_queued_reqs, self._limits.max_num_queued_tokens
        if most is not None and self.num_waiting and self.num_waiting + num > most:
            raise QueueFullError(f"{self.num_waiting} requests wait already; {most} may (max_num_queued_reqs)")
        if most_tokens is not None and self.num_waiting and self.num_waiting_tokens + num_tokens > most_tokens:
            raise QueueFullError(f"prompts of {self.num_waiting_tokens} tokens wait already; with {num_tokens} more "
                                 f"they would be above {most_tokens} (max_num_queued_tokens)")

    def _send(self, states: Sequence[RequestState], request: ProcessedRequest,
              beam_search: BeamSearchParams | None) -> None:
        first = states[0]
        self._client.send(AddRequest(
            client=self._client.client, handle=first.handle, request_id=first.request_id,
            prompt_token_ids=pack_ids(request.prompt_token_ids), sampling=request.sampling, arrival=request.arrival,
            priority=request.priority, cache_salt=request.cache_salt,
            num_public_tokens=request.num_public_tokens, deadline=request.deadline,
            controls=request.controls, grammar=request.grammar, beam_search=beam_search))
        for state in states:
            state.queued()


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    own = config.model.tokenizer
    if own is None:
        return Tokenizer(config.spec.path)
    try:
        return Tokenizer(resolve_model_path(own))
    except EngineStartError as error:
        # The message begins with the option's name, and the option is not the model here.
        raise EngineStartError(f"tokenizer: {str(error).partition(': ')[2]}") from None


def _close(client: EngineClient, invited: list[ClientAddress]) -> None:
    client.close()
    for address in invited:  # of those who never came
        remove_address(address)


def _abort(llm: weakref.ref[AsyncLLM], handles: list[int]) -> None:
    if (alive := llm()) is not None:
        alive._client.send(AbortRequests(client=alive._client.client, handles=handles))
