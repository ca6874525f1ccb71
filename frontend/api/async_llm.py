"""AsyncLLM: the engine as an application sees it."""

from __future__ import annotations

import itertools
import logging
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from sidestep.frontend.api.startup import load_tokenizer, open_channels, seed_of_frontend
from sidestep.frontend.input.input_processor import InputProcessor, ProcessedRequest
from sidestep.frontend.input.logits_controls import check_text
from sidestep.frontend.input.prompts import ChatPrompt, Prompt
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.beam_outputs import beam_search_output
from sidestep.frontend.output.choices import Choices
from sidestep.frontend.output.output_processor import Delivery, OutputProcessor
from sidestep.frontend.output.outputs import BeamSearchOutput, RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.frontend.replicas.replica_set import ReplicaSet, ReplicaStatus
from sidestep.frontend.vllm.vllm_names import RefusesVllmMethods, takes_vllm_arguments
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStalledError,
    QueueFullError,
    ValidationError,
)
from sidestep.ipc.config import EngineArgs, EngineConfig
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.processes.core_args import ClientAddress, Invitation
from sidestep.ipc.transport.channels import new_address, remove_address
from sidestep.ipc.transport.messages import AddRequest, Answer, pack_ids
from sidestep.ipc.transport.records import RequestRecord, StepRecord, unpack_requests, unpack_steps

logger = logging.getLogger(__name__)

_GRACE_S = 0.25
"""Seconds after a request's deadline until its frontend ends it, if the core has not."""
_ANSWER_S = 5.0
"""Seconds that a core may take to answer a question."""


class AsyncLLM(RefusesVllmMethods):
    """An engine with an asyncio face. Several may live in one process; each belongs to one event
    loop.

    Starting blocks until the engine serves, and may happen outside any event loop.
    """

    def __init__(self, config: EngineConfig, invitation: Invitation | None = None) -> None:
        """Starts an engine, or joins the one that sent an invitation. Raises EngineStartError, in
        one line, if it cannot.
        """
        # Weak, so that an engine that is only forgotten can still be collected, and then shut down.
        self_ref = weakref.ref(self)
        self._config = config
        self._invited: list[ClientAddress] = []
        self._outputs = OutputProcessor(lambda handles: _abort(self_ref, handles))
        self._replicas = ReplicaSet(
            config, self._outputs, open_channels(config, invitation), joins=invitation is not None
        )
        self._home = self._replicas.home
        self._finalizer = weakref.finalize(self, _close, self._replicas, self._invited)
        try:
            if invitation is None:
                self._replicas.start_cores()
            self._tokenizer = load_tokenizer(config)  # while the cores start
            self._replicas.wait_ready()
            if invitation is None:
                _tell_of_length(config, self._replicas.max_model_len)
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
        )
        self._limits = config.frontend
        self._preparing: dict[str, bool] = {}
        """Requests that are being checked and tokenised: whether they are still wanted."""
        self._handles = itertools.count()

    @classmethod
    @takes_vllm_arguments
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine with these options. Raises ValidationError, which names the option, or
        EngineStartError.
        """
        return cls(engine_args.create_engine_config())

    @classmethod
    def join(cls, invitation: str) -> Self:
        """A further frontend of an engine that runs already, most often in another process;
        `invitation` is what `invite` gave. Frontends take turns in the engine's queue. When one
        ends, its requests end, and no other's; when the one that started the engine ends, the
        engine does. Raises ValidationError, EngineStartError.
        """
        invited = Invitation.decode(invitation)
        return cls(invited.config, invited)

    async def invite(self) -> str:
        """Text with which one further program can `join` this engine."""
        self._replicas.attach()
        addresses = {replica: new_address() for replica in self._replicas.alive}
        self._invited += addresses.values()
        return Invitation(await self._replicas.seats(addresses), self._config).encode()

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
        """Streams the outputs of one request, with all its choices.

        `prompt` is text, token ids or chat messages. Leaving the loop, cancelling the task or
        dropping the generator ends the request and frees its memory. `priority` (lowest first)
        counts with scheduling_policy='priority'; requests share cached prefixes only with the same
        `cache_salt`, but for the full blocks of the prompt's first `num_public_tokens`, which are
        shared as without a salt; after `deadline_s` seconds the request ends with finish_reason
        'abort' and stop_reason 'deadline'.

        Raises ValidationError, which names the field; QueueFullError when too much waits already;
        RequestError when the engine refuses it; EngineDeadError.
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
        """Stream the answer to a conversation. ChatPrompt describes the template's arguments,
        `generate` the other arguments and the errors.
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
        """The `beam_width` best continuations of a prompt. Cancelling the task ends the search;
        after `deadline_s` seconds it gives what it has. Other arguments and errors as of
        `generate`.
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
    ) -> list[RequestState]:
        """Sends a request whose choices are read one by one, each by its own reader: `next_output`
        of what this returns. Whoever calls it must `leave` each of them in the end. Arguments and
        errors as of `generate`.
        """
        self._replicas.attach()
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        self._check_id(request_id)
        self._check_priority(priority)
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
        self._check_queue(
            num if beam_search is None else beam_search.beam_width, len(request.prompt_token_ids)
        )
        # One after the other: the engine is told the first's handle alone.
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

    @takes_vllm_arguments
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams end with finish_reason 'abort'. Unknown ids have ended
        already.
        """
        self._home.check()
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._outputs.abort(ids)
        for preparing in ids:
            if preparing in self._preparing:
                self._preparing[preparing] = False

    async def check_structured_outputs(self, structure: StructuredOutputsParams) -> None:
        """Raises ValidationError, as `generate` would, for a form that cannot be compiled."""
        self._home.check()
        await self._inputs.make_grammar(structure)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False
    ) -> list[int]:
        """Return the token ids of a text as `generate` would make them, without blocking the event
        loop on a long text.

        Raises PromptTooLongError, before tokenising, for a text so long that it cannot fit the
        model; with `must_fit`, for every text that leaves no room for output.
        """
        self._home.check()
        return await self._inputs.tokenize(text, add_special_tokens, must_fit=must_fit)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request of this frontend has been sent and the engine has not scheduled
        it yet.
        """
        return self._outputs.is_waiting(request_id)

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

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that brings none.

        They follow from the model's generation_config.json; see the option `generation_config`.
        """
        return self._inputs.default_sampling

    @property
    def sampling_defaults(self) -> dict[str, int | float]:
        """The sampling parameters that the model's generation_config.json sets."""
        return dict(self._config.sampling_defaults)

    async def check_health(self, *, timeout_s: float = 5.0, max_stall_s: float = 30.0) -> None:
        """Return if the engine makes progress. One of several replicas is enough (`replicas`
        describes each).

        Raises EngineDeadError if the engine has died; EngineStalledError if no core answers within
        `timeout_s`, or if the steps in flight of all cores that answer have made no progress for
        `max_stall_s`.
        """
        answers = await self._replicas.ask_responsive(
            "ping", timeout_s=timeout_s, is_good=lambda answer: _stalled_s(answer) <= max_stall_s
        )
        if any(_stalled_s(answer) <= max_stall_s for answer in answers.values()):
            return
        raise EngineStalledError(
            "; ".join(
                self._replicas.named(
                    replica,
                    f"the steps in flight have made no progress for {_stalled_s(answers[replica]):.1f} s"
                    if replica in answers
                    else f"the engine core has not answered for {timeout_s:g} s",
                )
                for replica in self._replicas.alive
            )
        )

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the engine has died, with what it died of; never after a shutdown. With
        several replicas: when all have.
        """
        return await self._replicas.wait_dead()

    @takes_vllm_arguments
    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, of all replicas; running requests go on."""
        answers = await self._replicas.ask_all("reset_prefix_cache")
        return all((answer.result or {})["done"] for answer in answers.values())

    async def get_stats(self) -> dict[str, float]:
        """Return counts of the scheduler and the KV cache, and the device's busy and idle seconds
        by cause; see engine_core.scheduler and engine_core.flight_recorder. With several replicas,
        return their sums, and the mean of the KV cache's usage. Raises EngineStalledError if no
        core answers.
        """
        return sum_stats((await self.get_stats_by_replica()).values())

    async def get_stats_by_replica(self) -> dict[int, dict[str, float]]:
        """Return the stats of each replica whose core answers, by the replica's number."""
        answers = await self._replicas.ask_responsive("stats", timeout_s=_ANSWER_S)
        if not answers:
            raise EngineStalledError(f"the engine core has not answered for {_ANSWER_S:g} s")
        return {replica: answer.result or {} for replica, answer in answers.items()}

    async def get_step_records(self, since: int = 0, *, replica: int = 0) -> list[StepRecord]:
        """The flight recorder of one replica: the last steps that have come back, from number
        `since` on, oldest first. It holds some thousand; asking stops nothing.
        """
        return unpack_steps(
            (
                await self._replicas.ask(replica, "step_records", since=since, timeout_s=_ANSWER_S)
            ).records
        )

    async def get_request_records(self, limit: int | None = None) -> list[RequestRecord]:
        """The last requests that have ended, oldest first, then all that have not, and what each of
        them waits for; replica by replica. With a limit at most so many of each that have ended,
        that run and that wait, which bounds what asking costs.
        """
        answers = await self._replicas.ask_responsive(
            "request_records", limit=limit, timeout_s=_ANSWER_S
        )
        return [
            msgspec.structs.replace(record, replica=replica) if replica else record
            for replica, answer in answers.items()
            for record in unpack_requests(answer.records)
        ]

    def get_deliveries(self) -> list[Delivery]:
        """When this frontend took the last steps' tokens in, oldest first."""
        return self._outputs.deliveries

    def shutdown(self) -> None:
        """End the engine and every request. May be called twice; also happens when the program
        ends. Raises SidestepError in a forked child.
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
        """Whether it can serve."""
        return self._home.is_here and self._finalizer.alive and not self.errored

    @property
    def errored(self) -> bool:
        """Whether it has died: no replica lives."""
        return self._replicas.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What it died of."""
        return self._replicas.dead_error

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The data-parallel replicas, which of them live, and what the others have died of."""
        return self._replicas.replicas

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._replicas.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of the model's token ids."""
        return self._config.spec.vocab_size

    @property
    def scheduling_policy(self) -> str:
        """The order of waiting requests: 'fcfs', or 'priority', which heeds their priorities."""
        return self._config.scheduler.scheduling_policy

    @property
    def num_kv_blocks(self) -> int:
        """Size of the KV cache, in blocks; of all replicas together."""
        return sum(ready.num_kv_blocks for ready in self._replicas.ready)

    @property
    def block_size(self) -> int:
        """Tokens that a KV block holds."""
        return self._replicas.ready[0].block_size

    @property
    def device(self) -> str:
        """What it runs on, for people."""
        size, device = self._config.parallel.data_parallel_size, self._replicas.ready[0].device
        return device if size == 1 else f"{size} x {device}"

    @property
    def core_pid(self) -> int:
        """Process id of the engine core; with several replicas, of the first."""
        return self._replicas.ready[0].core_pid

    @property
    def pids(self) -> dict[str, int]:
        """Process ids: this frontend's, the core's and each worker's. With several replicas the
        names of those begin with 'replica_N_'.
        """
        pids = {"frontend": os.getpid()}
        for status in self.replicas:
            if status.ready is not None:
                prefix = f"replica_{status.number}_" if len(self.replicas) > 1 else ""
                pids[f"{prefix}core"] = status.ready.core_pid
                pids |= {
                    f"{prefix}worker_{rank}": pid
                    for rank, pid in enumerate(status.ready.worker_pids)
                }
        return pids

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise ValidationError("request_id", f"must be a string, not {request_id!r}")
        check_text("request_id", request_id)
        if request_id in self._outputs or request_id in self._preparing:
            raise ValidationError(
                "request_id", f"{request_id!r} is in use by a request that has not ended"
            )

    def _check_priority(self, priority: object) -> None:
        if priority and self._config.scheduler.scheduling_policy != "priority":
            raise ValidationError(
                "priority",
                "counts only with the engine's option scheduling_policy='priority'; this "
                "one takes requests in the order in which they come",
            )

    def _check_queue(self, num: int, num_tokens: int) -> None:
        """Raises QueueFullError. A request that is larger than the limits by itself may wait alone,
        or it could never run.
        """
        most, most_tokens = self._limits.max_num_queued_reqs, self._limits.max_num_queued_tokens
        if most is not None and self.num_waiting and self.num_waiting + num > most:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already; {most} may (max_num_queued_reqs)"
            )
        if (
            most_tokens is not None
            and self.num_waiting
            and self.num_waiting_tokens + num_tokens > most_tokens
        ):
            raise QueueFullError(
                f"prompts of {self.num_waiting_tokens} tokens wait already; with {num_tokens} more "
                f"they would be above {most_tokens} (max_num_queued_tokens)"
            )

    def _send(
        self,
        states: Sequence[RequestState],
        request: ProcessedRequest,
        beam_search: BeamSearchParams | None,
    ) -> None:
        first = states[0]
        for state in states:  # before the core can have it: its times must come later
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
            )
        )
        for state in states:
            if request.deadline is not None:
                self._outputs.end_at(state, request.deadline + _GRACE_S)


def _tell_of_length(config: EngineConfig, max_model_len: int) -> None:
    """Log one line where the KV cache holds less than the model could take."""
    if max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d, which is what the KV cache holds; the model's own "
            "limit is %d (kv_cache_memory_bytes gives the cache more memory)",
            max_model_len,
            config.max_model_len,
        )


def _stalled_s(ping: Answer) -> float:
    """Return the seconds for which a replica's steps in flight have made no progress."""
    return (ping.result or {})["seconds_since_progress"]


def sum_stats(each: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of all replicas together."""
    stats = list(each)
    total = {name: sum(one[name] for one in stats) for name in stats[0]}
    total["kv_cache_usage"] /= len(stats)
    return total


def _close(replicas: ReplicaSet, invited: list[ClientAddress]) -> None:
    if not replicas.home.is_here:
        return
    replicas.close()
    for address in invited:  # of those who never came
        remove_address(address)


def _abort(llm: weakref.ref[AsyncLLM], handles: list[int]) -> None:
    if (alive := llm()) is not None and alive._home.is_here:
        alive._replicas.abort(handles)
