"""LLM: offline batches, for scripts and notebooks without an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import msgspec
import tqdm

from sidestep.frontend.async_llm import AsyncLLM
from sidestep.frontend.event_loop import new_event_loop
from sidestep.frontend.input_processor import Prompt
from sidestep.frontend.outputs import BeamSearchOutput, RequestOutput
from sidestep.frontend.replica_set import ReplicaStatus
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.beam_search_params import BeamSearchParams
from sidestep.ipc.config import DEFAULT_MODEL, EngineArgs
from sidestep.ipc.errors import EngineDeadError, ValidationError
from sidestep.ipc.records import RequestRecord, StepRecord
from sidestep.ipc.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """An engine for whole batches: each call returns when all of its requests have ended, in the order given.

    Runs an AsyncLLM on an event loop in a thread of its own, so it works where a loop runs already (a notebook).
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """`options` are those of EngineArgs. Raises ValidationError, TypeError for an unknown one, EngineStartError."""
        self._llm = AsyncLLM.from_engine_args(EngineArgs(model=model, **options))
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="LLM", daemon=True)
        self._thread.start()
        # Runs before the AsyncLLM's own finalizer, which must not meet a running loop of another thread.
        self._finalizer = weakref.finalize(self, _shut_down, self._llm, self._loop, self._thread)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Completes one prompt or many, with one SamplingParams for all or one for each."""
        return self._run_batch(as_list_of_prompts(prompts), sampling_params, use_tqdm)

    def chat(self, messages: Conversation | Sequence[Conversation],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answers one conversation or many."""
        return self._run_batch(as_list_of_conversations(messages), sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The best continuations of one prompt or many."""
        return self._call(_all_of([self._llm.beam_search(p, params) for p in as_list_of_prompts(prompts)]))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.get_tokenizer()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return self._call(self._llm.reset_prefix_cache())

    def get_stats(self) -> dict[str, float]:
        """As AsyncLLM.get_stats."""
        return self._call(self._llm.get_stats())

    def get_step_records(self, since: int = 0, *, replica: int = 0) -> list[StepRecord]:
        """As AsyncLLM.get_step_records."""
        return self._call(self._llm.get_step_records(since, replica=replica))

    def get_request_records(self) -> list[RequestRecord]:
        """As AsyncLLM.get_request_records."""
        return self._call(self._llm.get_request_records())

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """As AsyncLLM.replicas."""
        return self._llm.replicas

    @property
    def pids(self) -> dict[str, int]:
        """As AsyncLLM.pids."""
        return self._llm.pids

    def shutdown(self) -> None:
        """Ends the engine. May be called twice; also happens when the program ends."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"LLM({self._llm!r})"

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop's thread; Ctrl-C here cancels it there, which ends its requests."""
        if not self._finalizer.alive:
            coroutine.close()
            raise EngineDeadError("the engine has been shut down")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run_batch(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
                   use_tqdm: bool) -> list[RequestOutput]:
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValidationError("sampling_params", f"has {len(each)} entries for {len(prompts)} prompts")
        final = [msgspec.structs.replace(p if p is not None else SamplingParams(),
                                         output_kind=RequestOutputKind.FINAL_ONLY) for p in each]
        with Progress(len(prompts), enabled=use_tqdm) as progress:
            return self._call(self._gather(prompts, final, progress))

    async def _gather(self, prompts: list[Prompt], params: list[SamplingParams],
                      progress: Progress) -> list[RequestOutput]:
        async def run(prompt: Prompt, sampling: SamplingParams) -> RequestOutput:
            async for output in self._llm.generate(prompt, sampling):
                progress.add(output)
            return output

        return await _all_of([run(p, s) for p, s in zip(prompts, params, strict=True)])


async def _all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give. The first failure ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the engine on its own thread, then the thread."""

    async def shut_down() -> None:
        llm.shutdown()

    if threading.current_thread() is thread:  # the last reference to the engine was held by one of its own tasks
        llm.shutdown()
        loop.stop()
        return
    asyncio.run_coroutine_threadsafe(shut_down(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def as_list_of_conversations(messages: Conversation | Sequence[Conversation]) -> list[Prompt]:
    """One conversation or several, as a list."""
    given: object = messages
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ValidationError("messages", f"must be a list of messages, not {type(given).__name__}")
    if not given:
        raise ValidationError("messages", "is empty")
    conversations = [given] if isinstance(given[0], Mapping) else list(given)
    for one in conversations:
        if not isinstance(one, Sequence) or not one or not isinstance(one[0], Mapping):
            raise ValidationError("messages", f"holds {one!r}, which is not a list of messages")
    return cast(list[Prompt], conversations)


def as_list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of numbers or of messages is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    if prompts and isinstance(prompts[0], Mapping) and "role" in prompts[0]:
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


class Progress:
    """A bar of finished requests, with tokens a second in and out."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = tqdm.tqdm(total=total, disable=not enabled, desc="Processed prompts", dynamic_ncols=True)
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """One request has ended."""
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        rates = f"in {self._tokens_in / elapsed:.0f} tok/s, out {self._tokens_out / elapsed:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()
