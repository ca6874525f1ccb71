"""The calls of an application to a running engine's workers: profiles, memory, sleep, weights."""

from __future__ import annotations

import os

import msgspec

from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import EngineStartError, ValidationError, WorkerCallError
from sidestep.ipc.config import EngineConfig, with_whole_experts
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.model.model_spec import difference, load_model_spec
from sidestep.ipc.transport.worker_calls import (
    ApplyWeights,
    DropWeights,
    MemoryUse,
    PrepareWeights,
    Sleep,
    StartProfile,
    StopProfile,
    WakeUp,
)

_ANSWER_S = 5.0
"""Seconds that a core may take to answer a question."""
_MAY_DIFFER = frozenset(("path", "dtype", "eos_token_ids"))
"""Fields of a model's spec in which the folder of new weights may differ.

The weights are converted to the type of the run, and ends of sequence stay as they are.
"""


class EngineControl:
    """The part of AsyncLLM that calls the workers of all replicas.

    A call raises WorkerCallError if a worker refuses it or does not answer in time, and
    EngineDeadError. A task that is cancelled takes its call back, if the workers have not got it
    yet.
    """

    _config: EngineConfig
    _replicas: ReplicaSet

    @takes_vllm_arguments
    async def start_profile(self, path: str | None = None) -> None:
        """Begin to record what each worker does, with torch's profiler.

        path: folder for the files; by default that of the option profiler_dir. It is made where the
        engine runs. Recording slows the steps down.
        """
        folder = path if path is not None else self._config.frontend.profiler_dir
        if not folder:
            raise ValidationError("path", "must name a folder, as the option profiler_dir is unset")
        await self._replicas.call_workers(StartProfile(folder=os.path.abspath(folder)))

    @takes_vllm_arguments
    async def stop_profile(self) -> list[str]:
        """End the recording, and return the paths of the files, one a worker.

        They are JSON that Chrome's tracing and https://ui.perfetto.dev show.
        """
        answers = await self._replicas.call_workers(StopProfile())
        return [str(result["file"]) for results in answers.values() for result in results]

    async def get_memory_use(self) -> list[dict[str, int]]:
        """Return the memory that each worker uses, also while the engine sleeps.

        Each entry names a `replica` and a `rank` in it. All other values are bytes: `weights` and
        `kv_cache` are what the device holds of them now. A GPU adds `allocated`, which is all that
        torch has allocated for the worker, `reserved`, which is what torch holds of the GPU for
        that, and `free` and `total` of the whole GPU. A CPU adds `resident`, which is what the
        worker's process has in memory.
        """
        answers = await self._replicas.call_workers(MemoryUse())
        return [
            {"replica": replica, "rank": rank, **{name: int(n) for name, n in result.items()}}
            for replica, results in answers.items()
            for rank, result in enumerate(results)
        ]

    @takes_vllm_arguments
    async def sleep(self, level: int = 1, *, timeout_s: float = 60.0) -> None:
        """Free the memory of the KV cache and of the weights until `wake_up`.

        level: 1 keeps the weights in the host's memory, 2 drops them; they are read again then. The
        sleep begins when all requests have ended. Requests that come later wait until the engine is
        awake. Raises WorkerCallError if requests still run after `timeout_s` seconds; then the
        engine goes on.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValidationError("level", f"must be 1 or 2, not {level!r}")
        if not timeout_s >= 0:
            raise ValidationError("timeout_s", f"must be 0 or more, not {timeout_s!r}")
        try:
            await self._replicas.call_workers(Sleep(level=level), wait_s=timeout_s)
        except WorkerCallError:
            # Others than those that have refused may sleep.
            await self._replicas.call_workers(WakeUp())
            raise

    @takes_vllm_arguments
    async def wake_up(self) -> None:
        """End a sleep: take the memory again, and let the requests run that have waited.

        The KV cache is empty. If this raises WorkerCallError, for want of memory for example, the
        engine sleeps on, and it can be tried again.
        """
        await self._replicas.call_workers(WakeUp())

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps, or one of its replicas that answer does."""
        answers = await self._replicas.ask_responsive("sleep_level", timeout_s=_ANSWER_S)
        return any((answer.result or {})["level"] for answer in answers.values())

    async def update_weights(self, path: str) -> None:
        """Replace the weights by those of a folder, which has the same names and shapes.

        All workers read and check them first, so an error leaves the old weights in use. Then they
        take the place of the old ones between two steps. Requests that run go on with the new
        weights and with the keys and values of the old ones; cached prefixes are dropped. Raises
        ValidationError for a folder of another model, WorkerCallError.
        """
        folder = os.path.abspath(path)
        self._check_spec(folder)
        try:
            await self._replicas.call_workers(PrepareWeights(folder=folder))
            await self._replicas.call_workers(ApplyWeights(folder=folder))
        except BaseException:
            self._replicas.tell_workers(DropWeights())
            raise

    def _check_spec(self, folder: str) -> None:
        """Raise ValidationError if a folder's config.json, if any, describes another model."""
        if not os.path.isdir(folder):
            raise ValidationError("path", f"{folder!r} is not a folder")
        if not os.path.exists(os.path.join(folder, "config.json")):
            return
        try:
            model = self._config.model
            new = load_model_spec(
                folder,
                model.hf_overrides,
                quantization=model.quantization,
                head_quantization=model.head_quantization,
            )
            if self._config.parallel.enable_expert_parallel:
                new = with_whole_experts(new)
            cache = self._config.cache
            new = with_kv_cache_dtype(new, cache.kv_cache_dtype, cache.kv_cache_dtype_skip_layers)
        except EngineStartError as error:
            raise ValidationError("path", str(error)) from None
        for name, value in msgspec.structs.asdict(self._config.spec).items():
            if name not in _MAY_DIFFER and value != getattr(new, name):
                raise ValidationError(
                    "path", f"{folder} has {difference(getattr(new, name), value, name)}"
                )
