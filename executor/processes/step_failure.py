"""Exceptions in a step: which of them leave the worker able to go on after a reset.

A device that has reported an error reports it again at every later call, so only a new process
helps. The same is true of a message that was lost, and of tables that contradict themselves.
"""

from __future__ import annotations

import sys
import traceback

from sidestep.executor.base import StepFailed
from sidestep.executor.runner.runner import RowError
from sidestep.ipc.transport.shm_ring import RingClosed, RingDamagedError

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Classes of exceptions for want of memory; torch is not imported for its own."""
_OF_CPU_MEMORY = "DefaultCPUAllocator: "
"""Part of torch's message where the host has too little memory."""
_FATAL = ("AssertionError", "MessageLostError", "AcceleratorError", "DistError")
"""Classes of exceptions after which a worker cannot go on."""
_FATAL_WORDS = ("CUDA error", "CUDA driver error", "Triton Error", "CUBLAS_", "CUDNN_", "NCCL")
"""Parts of messages that come with the errors of devices and of ranks' messages."""


class MessageLostError(Exception):
    """A message of the core has not come, so the tables of this rank are not those it expects."""


class StepAbandonedError(Exception):
    """A step must not go on, because the core has taken it back."""


def failure_of(error: Exception, step_id: int, place: int | None = 0) -> StepFailed | None:
    """Return the report of an exception in a step; None if the worker must end.

    place: the part of the step that raised (Runner.place). Call it while the exception is handled.
    """
    if place is None:
        return None
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    if any(map(_is_fatal, causes)):
        return None
    is_oom = any(map(_is_out_of_memory, causes))
    return StepFailed(
        step_id=step_id,
        cause="oom" if is_oom else "exception",
        text=failure_text(),
        # A row that finds no memory is not to blame for the want of it.
        slot=error.slot if isinstance(error, RowError) and not is_oom else -1,
        place=place,
    )


def failure_text() -> str:
    """Return the exception being handled, for people: its own first line, then the trace."""
    error = sys.exception()
    assert error is not None, "no exception is being handled"
    told = "".join(traceback.format_exception_only(error)).splitlines()
    line = next(line for line in told if line and not line[0].isspace())
    if isinstance(error, RowError):
        line = str(error)
    return f"{line}\n{traceback.format_exc().strip()}"


def _is_out_of_memory(error: Exception) -> bool:
    return _is_a(error, _OUT_OF_MEMORY) or _OF_CPU_MEMORY in str(error)


def _is_fatal(error: Exception) -> bool:
    if isinstance(error, RingClosed | RingDamagedError) or _is_a(error, _FATAL):
        return True
    return not _is_out_of_memory(error) and any(word in str(error) for word in _FATAL_WORDS)


def _is_a(error: Exception, names: tuple[str, ...]) -> bool:
    """Return whether an exception is of a class with one of these names, or of a subclass."""
    return any(one.__name__ in names for one in type(error).__mro__)
