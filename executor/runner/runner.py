"""The interface of the device that a worker process runs its steps on.

No torch here: the fake runner must start without it. No numpy either: the core imports this file
before it launches its workers.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sidestep.executor.base import WorkerReady
from sidestep.executor.runner.worker_calls import answer_call
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.cache_groups import CacheGroups, cache_groups
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.transport.worker_calls import CallAnswer, SentCall

if TYPE_CHECKING:  # it imports numpy
    from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput


@dataclass(frozen=True, kw_only=True)
class WorkerArgs:
    """All that a worker needs to know; sent to its process as JSON."""

    rank: int
    """Within its replica."""
    spec: ModelSpec
    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    scheduler: SchedulerConfig
    max_model_len: int
    replica: int = 0
    """Index of the data-parallel replica; its GPUs follow those of the replicas before it."""
    start: int = 0
    """Number of times that the replica has been started before."""
    after: tuple[int, ...] = ()
    """Processes of the last start, which hold the device's memory until they have ended."""
    rendezvous: str | None = None
    """Where torch.distributed's ranks meet: a file's path, or tcp://address:port for ranks on
    several hosts; None with one rank."""
    listener: int | None = None
    """Descriptor of the listening socket of a tcp address, for rank 0."""
    compiled: int | None = None
    """A descriptor that reads end-of-file when the process that compiles kernels ahead has ended
    (executor/processes/kernel_compiler.py)."""
    gpu: int | None = None
    """Index of the rank's GPU among those that this process sees; None where the GPUs follow one
    another as the ranks of all replicas do."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        rank: int,
        replica: int = 0,
        start: int = 0,
        after: tuple[int, ...] = (),
        gpu: int | None = None,
    ) -> Self:
        """Return the arguments of one rank of an engine with this configuration."""
        return cls(
            rank=rank,
            replica=replica,
            start=start,
            after=after,
            spec=config.spec,
            model=config.model,
            cache=config.cache,
            parallel=config.parallel,
            scheduler=config.scheduler,
            max_model_len=config.max_model_len,
            gpu=gpu,
        )

    @property
    def gpu_index(self) -> int:
        """Index of the rank's GPU among those that this process sees, if it has one."""
        if self.gpu is not None:
            return self.gpu
        return self.replica * self.parallel.num_ranks + self.rank

    @property
    def stage(self) -> Stage:
        """The layers of this rank."""
        return self.parallel.stage(self.spec, self.rank)

    @property
    def stage_layers(self) -> tuple[LayerSpec, ...]:
        """The specifications of the layers of this rank."""
        own = self.stage.layers
        return self.spec.layers[own.start : own.stop]

    @property
    def cache_groups(self) -> CacheGroups:
        """The cache groups of the model."""
        return cache_groups(self.spec.layers, self.max_model_len)

    @property
    def rank_in_stage(self) -> int:
        """Index of the rank among those that share its layers."""
        return self.rank % self.parallel.tensor_parallel_size

    @property
    def answers(self) -> bool:
        """Whether this rank sends the outputs.

        It is the first of the ranks that sample, which all sample the same tokens.
        """
        return self.stage.is_last and self.rank_in_stage == 0


class RowError(Exception):
    """An exception in a step that one row is to blame for."""

    def __init__(self, slot: int, error: Exception) -> None:
        """Name the row by its slot."""
        super().__init__(f"{type(error).__name__}: {error}")
        self.slot = slot


class PendingOutput(abc.ABC):
    """A step that has been launched."""

    @property
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    @abc.abstractmethod
    def wait(self) -> StepOutput:
        """Block until the device has ended the step. Called from another thread than `execute`."""


class DoneOutput(PendingOutput):
    """The output of a device that computes while `execute` runs."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    @property
    def ready(self) -> bool:
        """True: the output is there."""
        return True

    def wait(self) -> StepOutput:
        """Return the output."""
        return self._output


class Runner(abc.ABC):
    """One rank's model and its tables.

    The tables have a row for each slot, and change only by the differences in a step.
    """

    ready: WorkerReady
    """Facts that the rank found out while it was loaded."""
    calls: Sequence[object]
    """The parts that answer calls (executor/runner/worker_calls.py)."""

    @abc.abstractmethod
    def __init__(self, args: WorkerArgs) -> None:
        """Load the weights and allocate the KV cache.

        Raises EngineStartError with one line for the user.
        """
        self.place: int | None = 0
        """Number of the part of the step that runs now, or that has raised. Ranks of a stage that
        raise in the same part have launched the same operations among ranks. None in a part that
        has such operations: there another rank may wait for the one that raises."""

    @abc.abstractmethod
    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        """Launch a step. Its columns may be used until this returns.

        receive_masks: waits for the masks of a step that awaits some. It is called when the model
        has been launched, since the masks depend on the step before.

        After an exception other than an AssertionError, `reset` may make further steps possible.
        Raises RowError where one row is to blame.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all requests, after an exception in a step; every request enters again.

        Weights, KV cache and captured graphs stay. Raises what the device reports if it is broken.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """End what is under way between ranks.

        It is called when no step has come for a while, before the wait for the next step.
        """

    def answer(self, sent: SentCall) -> CallAnswer:
        """Do what a call asks for, and return the answer, which may be a refusal."""
        return answer_call(sent, self.calls)
