"""The calls of an application to the workers of a running engine: profiles."""

from __future__ import annotations

import os

from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.transport.worker_calls import StartProfile, StopProfile


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
