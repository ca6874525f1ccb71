"""LLM: offline batches, for scripts and notebooks without an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self, TypeVar

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.batch import (
    Bar,
    Conversation,
    Progress,
    all_of,
    as_list_of_conversations,
    as_list_of_prompts,
)
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.pooling_calls import PoolingCalls
from sidestep.frontend.input.input_processor import as_sampling_params
from sidestep.frontend.input.prompts import ChatPrompt, Prompt
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.outputs import BeamSearchOutput, RequestOutput
from sidestep.frontend.replicas.replica_status import ReplicaStatus
from sidestep.frontend.vllm.vllm_names import RefusesVllmMethods, takes_vllm_arguments
from sidestep.ipc.common.errors import EngineDeadError, SidestepError, ValidationError
from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from sidestep.ipc.processes.forking import Home
from sidestep.ipc.transport.records import RequestRecord, StepRecord

T = TypeVar("T")
OneParams = SamplingParams | Mapping[str, Any]
Params = OneParams | Iterable[OneParams] | None
"""Sampling parameters for all prompts, or one for each; each may be a dict of fields."""


class LLM(PoolingCalls, RefusesVllmMethods):
    """An engine for whole batches.

    Each call returns when all of its requests have ended, with the results in the order of its
    prompts. It runs an AsyncLLM on an event loop in a thread of its own, so it also works where a
    loop runs already (a notebook).
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """Start an engine; `options` are the options of EngineArgs.

        Raises ValidationError, which names an unknown or wrong option, or EngineStartError.
        """
        self._llm = AsyncLLM.from_engine_args(EngineArgs(model=model, **options))
        self._is_asleep = False
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="LLM", daemon=True)
        self._thread.start()
        # Runs before the AsyncLLM's own finalizer, which must not meet a running loop of another
        # thread.
        self._home = Home()
        self._finalizer = weakref.finalize(
            self, _shut_down, self._home, self._llm, self._loop, self._thread
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an engine with these options. Raises ValidationError or EngineStartError."""
        return cls(**{f.name: getattr(engine_args, f.name) for f in fields(engine_args)})

    @takes_vllm_arguments
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        `sampling_params` and `priority` hold for all prompts, or are lists with one for each.
        """
        return self._run_batch(as_list_of_prompts(prompts), sampling_params, use_tqdm, priority)

    @takes_vllm_arguments
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: Params = None,
        use_tqdm: Bar = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many. ChatPrompt describes the template's arguments."""
        prompts: list[Prompt] = [
            ChatPrompt(
                messages=one,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for one in as_list_of_conversations(messages)
        ]
        return self._run_batch(prompts, sampling_params, use_tqdm, priority)

    @takes_vllm_arguments
    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, use_tqdm: Bar = False
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of one prompt or many."""
        self._check_awake()
        several = as_list_of_prompts(prompts)
        with Progress(len(several), use_tqdm) as progress:

            async def search(prompt: Prompt) -> BeamSearchOutput:
                output = await self._llm.beam_search(prompt, params)
                num_prompt = len(output.prompt_token_ids)
                progress.add(
                    num_prompt, sum(len(found.tokens) - num_prompt for found in output.sequences)
                )
                return output

            return self._call(all_of([search(prompt) for prompt in several]))

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters; see AsyncLLM."""
        return self._llm.get_default_sampling_params()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._llm.max_model_len

    @takes_vllm_arguments
    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes; running requests continue."""
        return self._call(self._llm.reset_prefix_cache())

    @takes_vllm_arguments
    def start_profile(self, path: str | None = None) -> None:
        """Begin to record what each worker does; see AsyncLLM.start_profile."""
        self._call(self._llm.start_profile(path))

    @takes_vllm_arguments
    def stop_profile(self) -> list[str]:
        """End the recording, and return the paths of its files; see AsyncLLM.stop_profile."""
        return self._call(self._llm.stop_profile())

    def get_memory_use(self) -> list[dict[str, int]]:
        """Return the bytes of memory that each worker uses; see AsyncLLM.get_memory_use."""
        return self._call(self._llm.get_memory_use())

    @takes_vllm_arguments
    def sleep(self, level: int = 1, *, timeout_s: float = 60.0) -> None:
        """Free the memory of the KV cache and of the weights; see AsyncLLM.sleep.

        Until `wake_up`, calls with prompts raise SidestepError: they would wait for ever.
        """
        self._call(self._llm.sleep(level, timeout_s=timeout_s))
        self._is_asleep = True

    @takes_vllm_arguments
    def wake_up(self) -> None:
        """End a sleep; see AsyncLLM.wake_up."""
        self._call(self._llm.wake_up())
        self._is_asleep = False

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps; see AsyncLLM.is_sleeping."""
        return self._call(self._llm.is_sleeping())

    def update_weights(self, path: str) -> None:
        """Replace the weights by those of a folder; see AsyncLLM.update_weights."""
        self._call(self._llm.update_weights(path))

    def get_stats(self) -> dict[str, float]:
        """Return the engine's statistics; see AsyncLLM.get_stats."""
        return self._call(self._llm.get_stats())

    def get_step_records(self, since: int = 0, *, replica: int = 0) -> list[StepRecord]:
        """Return the flight recorder's steps; see AsyncLLM.get_step_records."""
        return self._call(self._llm.get_step_records(since, replica=replica))

    def get_request_records(self) -> list[RequestRecord]:
        """Return the records of requests; see AsyncLLM.get_request_records."""
        return self._call(self._llm.get_request_records())

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The data-parallel replicas; see AsyncLLM.replicas."""
        return self._llm.replicas

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the engine's processes; see AsyncLLM.pids."""
        return self._llm.pids

    def shutdown(self) -> None:
        """End the engine.

        May be called twice; also happens when the program ends. Raises SidestepError in a forked
        child.
        """
        self._home.check()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._home.is_here:  # a forked child that leaves the block ends nothing
            self.shutdown()

    def __repr__(self) -> str:
        return f"LLM({self._llm!r})"

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread, and return its result.

        Ctrl-C in the calling thread cancels the coroutine there, which ends its requests.
        """
        if not self._home.is_here:
            coroutine.close()
            self._home.check()
        if not self._finalizer.alive:
            coroutine.close()
            raise EngineDeadError("the engine has been shut down")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run_batch(
        self,
        prompts: list[Prompt],
        params: Params,
        use_tqdm: Bar,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Run the prompts.

        `params` and `priority` hold for all prompts, or are lists with one for each.
        """
        self._check_awake()
        each = (
            [params] * len(prompts)
            if params is None or isinstance(params, SamplingParams | Mapping)
            else list(params)
        )
        priorities = (
            [priority or 0] * len(prompts)
            if priority is None or isinstance(priority, int)
            else list(priority)
        )
        for name, given in (("sampling_params", each), ("priority", priorities)):
            if len(given) != len(prompts):
                raise ValidationError(name, f"has {len(given)} entries for {len(prompts)} prompts")
        default = self.get_default_sampling_params()
        sampling = [default if one is None else as_sampling_params(one) for one in each]
        with Progress(len(prompts), use_tqdm) as progress:
            return self._call(self._gather(prompts, sampling, priorities, progress))

    def _check_awake(self) -> None:
        if self._is_asleep:
            raise SidestepError("the engine sleeps; call wake_up() first")

    async def _gather(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        priorities: Sequence[int],
        progress: Progress,
    ) -> list[RequestOutput]:
        async def run(prompt: Prompt, sampling: SamplingParams, priority: int) -> RequestOutput:
            # Copied here, since the device waits for the first requests of many.
            final = sampling.clone(output_kind=RequestOutputKind.FINAL_ONLY)
            async for output in self._llm.generate(prompt, final, priority=priority):
                pass
            progress.add(
                len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs)
            )
            return output

        return await all_of([run(*one) for one in zip(prompts, params, priorities, strict=True)])


def _shut_down(
    home: Home, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    """End the engine on its own thread, then the thread.

    In a forked child, which has no such thread, do nothing.
    """
    if not home.is_here:
        return

    async def shut_down() -> None:
        llm.shutdown()

    if (
        threading.current_thread() is thread
    ):  # the last reference to the engine was held by one of its own tasks
        llm.shutdown()
        loop.stop()
        return
    asyncio.run_coroutine_threadsafe(shut_down(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
