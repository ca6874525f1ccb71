"""The words between the core and a worker process, beside the steps themselves.

The core imports this before it launches its workers. So nothing here imports numpy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.transport.shm_ring import RingSpec


class Order(enum.IntEnum):
    """Kinds of message from the core to its workers."""

    STEP = 0
    """Columns of StepInput."""
    MASKS = 1
    """Columns of StepMasks."""
    CALL = 2
    """MessagePack of SentCall."""
    RESET = 3
    """Empty: forget all requests; the steps and masks before it do not count."""


class Reply(enum.IntEnum):
    """Kinds of message from a worker to the core."""

    READY = 0
    """JSON of WorkerReady."""
    OUTPUT = 1
    """Columns of StepOutput."""
    FAILED = 2
    """JSON of Failure: the worker could not start, or a step or call raised."""
    ANSWER = 3
    """MessagePack of CallAnswer."""
    STEP_FAILED = 4
    """MessagePack of StepFailed: a step raised, and the worker waits for the order to reset."""
    RESET = 5
    """Empty: the worker has forgotten all requests; outputs from here on are of new steps."""
    GONE = 6
    """Said in the place of a worker that has ended; see executor/hosts/host_ranks.py."""


class Failure(msgspec.Struct, frozen=True):
    """A worker's report of why it ends."""

    text: str
    """The reason, for people. One line, if the user can do something about it."""
    at_ns: int
    """When it failed, on the monotonic clock that the machine's processes share: a rank that waits
    for a failed rank may fail too."""


@dataclass(frozen=True, kw_only=True)
class WorkerProcArgs:
    """Arguments of the process, sent as JSON."""

    worker: WorkerArgs
    steps: RingSpec
    reader: int
    replies: RingSpec
    cpu_threads: int
