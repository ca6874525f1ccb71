"""A worker process: one rank's runner between two rings.

Order of side effects: a step is decoded, its differences are applied and its work is launched
before the next step is read. So steps reach the device in the order they were sent. Outputs go back
in that order too: from this thread when it finds them ready, otherwise from the drain thread. The
main thread never waits for the device.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass

import msgspec

from sidestep.executor.gpu.cuda_driver import begin_context, has_driver
from sidestep.executor.runner.runner import PendingOutput, Runner, WorkerArgs
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.processes.process import decode_args, freeze_heap
from sidestep.ipc.transport.shm_ring import SPIN_S, RingClosed, RingReader, RingSpec, RingWriter
from sidestep.ipc.transport.step import StepInput, StepMasks

_IDLE_S = 1.0
"""Seconds without a message after which the runner settles."""


class Order(enum.IntEnum):
    """Kinds of message from the core to its workers."""

    STEP = 0
    """Columns of StepInput."""
    MASKS = 1
    """Columns of StepMasks."""


class Reply(enum.IntEnum):
    """Kinds of message from a worker to the core."""

    READY = 0
    """JSON of WorkerReady."""
    OUTPUT = 1
    """Columns of StepOutput."""
    FAILED = 2
    """JSON of Failure: the worker could not start, or a step raised."""


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


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that has been launched, and when the host had received and launched it."""

    pending: PendingOutput
    received_ns: int
    launched_ns: int


class OutputDrain:
    """Sends outputs in order: from the main thread as long as it has time, else from a thread.

    That thread may wait for the device.
    """

    def __init__(self, replies: RingWriter) -> None:
        self._replies = replies
        self._looked_at: deque[Launched] = deque()
        """Steps that the main thread looks at; none of them belongs to the waiting thread."""
        self._queue: queue.SimpleQueue[Launched] = queue.SimpleQueue()
        # Two counts, each changed by one thread alone.
        self._num_left = 0
        self._num_waited_for = 0
        threading.Thread(target=self._run, name="drain", daemon=True).start()

    def put(self, step: Launched) -> None:
        """Add the next step."""
        self._looked_at.append(step)
        self.send_ready()

    def send_ready(self) -> bool:
        """Send the outputs that can be sent without waiting; return whether there were any."""
        sent = False
        while (
            self._looked_at
            and self._num_left == self._num_waited_for
            and self._looked_at[0].pending.ready
        ):
            self._send(self._looked_at.popleft())
            sent = True
        return sent

    def wait_for_rest(self) -> None:
        """Leave the rest to the thread, since the main thread is about to block."""
        while self._looked_at:
            self._num_left += 1
            self._queue.put(self._looked_at.popleft())

    def _send(self, step: Launched) -> None:
        output = step.pending.wait()
        output.received_ns, output.launched_ns = step.received_ns, step.launched_ns
        self._replies.send(output.encode(), Reply.OUTPUT)

    def _run(self) -> None:
        while True:
            step = self._queue.get()
            try:
                self._send(step)
            except Exception:
                # A device reports a failed kernel at the next wait, which is here.
                report(self._replies, failure_text())
                return
            self._num_waited_for += 1


def failure_text() -> str:
    """Return the exception being handled, for people: its last line first, then the trace."""
    trace = traceback.format_exc().strip()
    return f"{trace.splitlines()[-1]}\n{trace}"


def report(replies: RingWriter, text: str) -> None:
    """Report to the core why this worker fails."""
    replies.send([msgspec.json.encode(Failure(text, time.monotonic_ns()))], Reply.FAILED)


def load_runner(args: WorkerProcArgs) -> Runner:
    """Return the runner of the device that was asked for, or that was found."""
    device = args.worker.parallel.device
    if device != "fake":
        if device != "cpu" and has_driver():
            begin_beside_torch(args.worker.gpu_index)
        import torch

        from sidestep.executor.models.model_loading import pick_device

        torch.set_num_threads(args.cpu_threads)
        device = pick_device(args.worker).type
    runner: Runner = registry.load(registry.RUNNERS[device])(args.worker)
    return runner


def begin_beside_torch(gpu_index: int) -> None:
    """Begin slow work in C, in threads beside this thread's import of torch."""
    threading.Thread(target=begin_context, args=(gpu_index,), daemon=True).start()
    threading.Thread(target=_know_triton, daemon=True).start()


def _know_triton() -> None:
    from sidestep.kernels.compiling import know_triton

    know_triton()


def main(raw: bytes) -> None:
    """Run the process."""
    args = decode_args(raw, WorkerProcArgs)
    replies = RingWriter(args.replies)
    try:
        runner = load_runner(args)
        ready = runner.load()
    except EngineStartError as error:
        report(replies, str(error))
        return
    except Exception:
        report(replies, failure_text())
        raise
    try:
        replies.send([msgspec.json.encode(ready)], Reply.READY)
        freeze_heap()
        run_steps(runner, RingReader(args.steps, args.reader), replies, answers=args.worker.answers)
    except RingClosed:
        pass  # the core has ended
    except Exception:
        report(replies, failure_text())
        raise


def run_steps(runner: Runner, steps: RingReader, replies: RingWriter, *, answers: bool) -> None:
    """Run steps until the core closes the ring. Only one rank sends outputs.

    Masks that the runner does not ask for are dropped: this stage comes before the last.
    """
    drain = OutputDrain(replies)
    while True:
        wait_for_step(runner, steps, drain)
        message = steps.receive()
        if message is None or message[0] == Order.MASKS:
            continue
        received = time.monotonic_ns()
        step = StepInput.decode(message[1])
        if step.awaits_masks:  # the step's bytes must outlive the arrival of the next message
            step = StepInput.decode(bytes(message[1]))
        pending = runner.execute(step, lambda: receive_masks(runner, steps, drain))
        if answers:
            drain.put(Launched(pending, received, time.monotonic_ns()))


def receive_masks(runner: Runner, steps: RingReader, drain: OutputDrain) -> StepMasks:
    """Return the masks of the step that is being launched.

    They cannot come before the output of the step before has left.
    """
    while (message := steps.receive()) is None:
        wait_for_step(runner, steps, drain)
    assert message[0] == Order.MASKS
    return StepMasks.decode(message[1])


def wait_for_step(runner: Runner, steps: RingReader, drain: OutputDrain) -> None:
    """Look for a step and for outputs in turn, for a bounded time; then block.

    Looking answers in microseconds. Waking a thread that waits takes tens of microseconds, several
    times on the way from one step to the next.
    """
    until = time.perf_counter() + SPIN_S
    while SPIN_S and not steps.has_message:
        if drain.send_ready():
            until = time.perf_counter() + SPIN_S
        elif time.perf_counter() > until:
            break
    if not steps.has_message:
        drain.wait_for_rest()
        if not steps.wait(_IDLE_S):
            runner.settle()
            steps.wait()
