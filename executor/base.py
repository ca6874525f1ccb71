"""The engine core's view of the workers.

The core imports this file before it launches them. So it imports neither torch nor numpy.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from sidestep.ipc.processes.cpu_use import CpuUse
from sidestep.ipc.transport.worker_calls import AnyCall, CallResult

if TYPE_CHECKING:  # it imports numpy
    from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a rank found out while it loaded its part of the model."""

    num_kv_blocks: int
    block_size: int
    """Tokens in a KV block."""
    num_states: int = 0
    """States of recurrent layers; 0 in a model without such layers."""
    device_type: str
    """'cuda', 'cpu' or 'fake'."""
    device: str
    """A description for people: 'cpu (2 threads)', 'NVIDIA H200', 'fake'."""


class StepFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A step that raised, in a worker that can go on after a reset of its tables."""

    step_id: int
    cause: Literal["oom", "exception"]
    """'oom' where memory was short."""
    text: str
    """The exception, for people: its own first line, then the trace."""
    slot: int = -1
    """Slot of the row that is to blame; -1 if no row is known to be."""
    place: int = 0
    """The part of the step that raised (Runner.place). Ranks that raised in the same part have
    taken part in the same operations among ranks."""

    @property
    def line(self) -> str:
        """The first line of `text`."""
        return self.text.partition("\n")[0]


class Answered(NamedTuple):
    """A call that all ranks have answered."""

    number: int
    """The number that `Executor.call` returned."""
    results: list[CallResult]
    """One a rank, in their order."""
    error: str | None
    """Why ranks have refused the call; it names them, unless all say the same."""
    num_refused: int = 0
    """Number of ranks that have refused the call."""


class Executor(abc.ABC):
    """Runs steps on all ranks, in the order they are submitted.

    `submit` never waits for the device. Outputs come back in order. An executor that has failed
    raises EngineDeadError, which names the cause, from every later call.
    """

    def what_devices_need(self) -> str | None:
        """Return what must be done before the devices can be used again; None if nothing.

        Called before `launch`, after the death of the workers that used the devices.
        """
        return None

    @abc.abstractmethod
    def launch(self) -> None:
        """Begin to start the workers, and return at once."""

    @abc.abstractmethod
    def start(self) -> WorkerReady:
        """Wait until the workers have loaded the model; after `launch`.

        Raises EngineStartError.
        """

    @abc.abstractmethod
    def submit(self, step: StepInput) -> None:
        """Hand a step to all ranks."""

    @abc.abstractmethod
    def submit_masks(self, masks: StepMasks) -> None:
        """Hand all ranks the masks of the last step submitted that awaits some."""

    @abc.abstractmethod
    def poll(self) -> StepOutput | StepFailed | None:
        """Return the next output if it is there. Its columns are valid until the next call.

        After a step that failed nothing comes but answers to calls, until `reset`.
        """

    def next_look(self) -> float | None:
        """Return the latest time of the next `poll`, on the monotonic clock; None for no limit."""
        return None

    @abc.abstractmethod
    def reset(self) -> None:
        """Have the workers forget all requests, after a step that failed.

        Steps and masks that they have been sent before are not run, or give no output.
        """

    @abc.abstractmethod
    def call(self, call: AnyCall) -> int:
        """Hand all ranks a call, behind the steps submitted so far, and return its number."""

    @abc.abstractmethod
    def take_answered(self) -> list[Answered]:
        """Return the calls that have been answered by now; `poll` takes the ranks' answers."""

    @abc.abstractmethod
    def missing_ranks(self, number: int) -> str:
        """Return the names of the ranks that have not answered a call, for users."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there is something to do.

        That is when `poll` may have an output or take an answer, or when a worker has died.
        """

    @abc.abstractmethod
    def worker_pids(self) -> list[int]:
        """Return one process id for each rank on this host."""

    def cpu_use(self) -> CpuUse:
        """Return the CPU time of all ranks, beginning with now."""
        return CpuUse(self.worker_pids())

    def num_refused(self) -> int:
        """Return the number of strangers' connections that have been refused at open ports."""
        return 0

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill all workers at once, and do not wait for their end."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End all workers. May be called twice."""
