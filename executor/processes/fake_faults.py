"""Makes the faults of a plan in a worker on the fake device; see ipc/common/fault_plan.py.

A runner around the fake one makes those of steps, and the ends of the worker's two rings those of
messages. The worker and the fake device know nothing of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from sidestep.executor.runner.runner import PendingOutput, RowError, Runner, WorkerArgs
from sidestep.ipc.common.fault_plan import Fault, FaultPlan, FaultyMessage
from sidestep.ipc.transport.shm_ring import RingReader, RingSpec, RingWriter
from sidestep.ipc.transport.step import StepInput, StepMasks


class PlannedFaultError(Exception):
    """The exception that a plan asks for."""


class PlannedOutOfMemoryError(PlannedFaultError, MemoryError):
    """The want of memory that a plan asks for."""


def faults_of(args: WorkerArgs) -> tuple[Fault, ...]:
    """Return the faults that a rank must make; none without a plan."""
    given = args.parallel.fake_faults
    return () if given is None else FaultPlan.of(given).of_rank(args.replica, args.rank, args.start)


class FaultyRunner(Runner):
    """A runner whose steps have faults."""

    def __init__(self, inner: Runner, faults: Iterable[Fault]) -> None:
        """Use another runner for all that a step does."""
        self._inner = inner
        self._faults = [fault for fault in faults if fault.message is None]
        self._poisons: dict[int, set[int]] = {}
        """The tokens among those of `for_token` that each slot's request has entered with."""
        self.ready, self.calls = inner.ready, inner.calls
        self.place = inner.place

    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        """Make the faults of a step, then launch it if the process still can."""
        wanted = {f.for_token for f in self._faults if f.for_token is not None}
        for num_prompt, (slot, positions, tokens, _, _) in zip(
            step.entering["num_prompt"].tolist(), step.entering_rows(), strict=True
        ):
            sent = step.new_token_ids[tokens].tolist()
            self._poisons[slot] = wanted & set(sent[: max(0, num_prompt - positions.start)])
        run = {token: slot for slot in step.slots.tolist() for token in self._poisons.get(slot, ())}
        self.place = 0
        for fault in self._faults:
            if fault.for_token is not None:
                is_due = fault.for_token in run
            else:
                is_due = fault.at == step.step_id or (
                    fault.kind == "slow" and fault.at is not None and step.step_id > fault.at
                )
            if is_due:
                _happen(
                    fault, step.step_id, -1 if fault.for_token is None else run[fault.for_token]
                )
        try:
            return self._inner.execute(step, receive_masks)
        finally:
            self.place = self._inner.place

    def settle(self) -> None:
        """End what is under way between ranks."""
        self._inner.settle()

    def reset(self) -> None:
        """Forget all requests."""
        self._poisons.clear()
        self._inner.reset()


def _happen(fault: Fault, step_id: int, slot: int) -> None:
    """Make a fault of a step. slot: that of the request that it is for."""
    if fault.kind == "slow":
        time.sleep(fault.seconds)
        return
    if fault.kind == "oom":
        raise PlannedOutOfMemoryError(f"the fault plan has no memory at step {step_id}")
    if fault.kind == "raise":
        error = PlannedFaultError(f"the fault plan raises at step {step_id}")
        raise RowError(slot, error) if fault.named else error
    if fault.process == "core":
        os.kill(os.getppid(), signal.SIGKILL if fault.kind == "die" else signal.SIGSTOP)
    elif fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Event().wait()  # the lifeline still ends the process


class _Damage:
    """Counts the messages of a ring by their sort, and says what happens to the next one."""

    def __init__(self, faults: Iterable[Fault], kinds: Sequence[FaultyMessage]) -> None:
        self._faults = {
            (fault.message, fault.at): fault.kind for fault in faults if fault.message in kinds
        }
        self._kinds = kinds
        self._counts = [0] * len(kinds)

    def next(self, kind: int) -> Literal["drop", "corrupt"] | None:
        """Count a message of this kind, and return what happens to it."""
        if kind >= len(self._kinds):
            return None
        number = self._counts[kind]
        self._counts[kind] += 1
        found = self._faults.get((self._kinds[kind], number))
        return found if found in ("drop", "corrupt") else None


class FaultyReader(RingReader):
    """The reading end of the steps' ring, on which messages are lost or changed."""

    def __init__(self, spec: RingSpec, reader: int, faults: Iterable[Fault]) -> None:
        super().__init__(spec, reader)
        self._damage = _Damage(faults, ("step", "masks"))
        self._fate: Literal["drop", "corrupt"] | None = None
        self._is_first = True
        """Whether the next slot begins a message."""

    def receive(self) -> tuple[int, memoryview] | None:
        """Return the next message that is not lost."""
        while True:
            self._fate, self._is_first = None, True
            message = super().receive()
            if message is None or self._fate != "drop":
                return message

    def _arrived(self, kind: int, payload: memoryview) -> memoryview:
        if not self._is_first:
            return payload
        self._is_first, self._fate = False, self._damage.next(kind)
        return _changed(payload) if self._fate == "corrupt" else payload


class FaultyWriter(RingWriter):
    """The writing end of the replies' ring, on which messages are lost or changed."""

    def __init__(self, spec: RingSpec, faults: Iterable[Fault]) -> None:
        super().__init__(spec)
        # The first kind of reply, "ready", has no faults.
        self._damage = _Damage(faults, ("output",))
        self._corrupts = False

    def send(
        self, parts: Iterable[bytes | memoryview], kind: int = 0, timeout_s: float = 30.0
    ) -> None:
        """Write a message, unless it is one that is lost."""
        fate = self._damage.next(kind - 1) if kind > 0 else None
        self._corrupts = fate == "corrupt"
        if fate != "drop":
            super().send(parts, kind, timeout_s)

    def _seal(self, payload: memoryview) -> int:
        checksum = super()._seal(payload)
        if self._corrupts:
            self._corrupts = False
            payload[:] = _changed(payload)
        return checksum


def _changed(payload: memoryview) -> memoryview:
    """Return a copy of a payload with one bit changed."""
    copy = bytearray(payload)
    copy[len(copy) // 2] ^= 1
    return memoryview(copy)
