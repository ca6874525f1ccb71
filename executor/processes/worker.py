"""A worker process: one rank's runner between two rings.

Order of side effects: a step is decoded, its differences are applied and its work is launched
before the next step is read. So steps reach the device in the order they were sent. Outputs go back
in that order too: from this thread when it finds them ready, otherwise from the drain thread. The
main thread never waits for the device. A call is answered between two steps, and its answer goes
back behind the outputs of the steps before it.

A step may raise and leave the worker able to go on (step_failure.py). The report goes back in the
place of the output. Then no step is run until the core has had the tables reset, and what is sent
behind that order belongs to new steps. With several ranks, the core compares their reports
(rank_failures.py).
"""

from __future__ import annotations

import abc
import enum
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from sidestep.executor.gpu.cuda_driver import begin_context, has_driver
from sidestep.executor.processes.fake_faults import (
    FaultyReader,
    FaultyRunner,
    FaultyWriter,
    faults_of,
)
from sidestep.executor.processes.step_failure import (
    MessageLostError,
    StepAbandonedError,
    failure_of,
    failure_text,
)
from sidestep.executor.processes.torch_import import import_torch
from sidestep.executor.processes.worker_orders import Failure, Order, Reply, WorkerProcArgs
from sidestep.executor.runner.runner import PendingOutput, Runner, WorkerArgs
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.processes.process import (
    decode_args,
    freeze_heap,
    uncollected_imports,
    wait_for_end,
)
from sidestep.ipc.transport.shm_ring import SPIN_S, RingClosed, RingReader, RingWriter
from sidestep.ipc.transport.step import StepInput, StepMasks
from sidestep.ipc.transport.worker_calls import CallAnswer, SentCall, decode_call, encode
from sidestep.kernels.triton_key import compute_key

_IDLE_S = 1.0
"""Seconds without a message after which the runner settles."""
_DOZE_S, _NAP_S = 0.5, 100e-6
"""Seconds for which a worker looks for the end of a long step, and those that it sleeps between."""


class Resets(enum.Enum):
    """The exceptions in a step after which a worker may go on."""

    NEVER = 0
    """In a pipeline another stage may wait for what this one was to send or to receive."""
    ALIKE = 1
    """Exceptions that come to all ranks of the replica at the same place, where none waits for
    another: in the host's parts of a step."""
    ALONE = 2
    """All that leave the device usable: the replica has one rank."""

    @classmethod
    def of(cls, args: WorkerArgs) -> Resets:
        """Return those of a replica's ranks."""
        if args.parallel.pipeline_parallel_size > 1:
            return cls.NEVER
        return cls.ALONE if args.parallel.num_ranks == 1 else cls.ALIKE


class Outgoing(abc.ABC):
    """A message to the core that is sent when it is ready."""

    @property
    @abc.abstractmethod
    def ready(self) -> bool:
        """Whether `send` would return at once."""

    @abc.abstractmethod
    def send(self, replies: RingWriter) -> None:
        """Wait until the message is ready, and send it."""


@dataclass(frozen=True, slots=True)
class Launched(Outgoing):
    """A step that has been launched, and when the host had received and launched it."""

    pending: PendingOutput
    step_id: int
    received_ns: int
    launched_ns: int
    resets: bool
    """Whether the worker may go on if the device's part of the step fails."""

    @property
    def ready(self) -> bool:
        """Whether the device has ended the step."""
        return self.pending.ready

    def send(self, replies: RingWriter) -> None:
        """Wait for the step's end, and send its output, or the report of its failure."""
        try:
            output = self.pending.wait()
        except Exception as error:
            failed = failure_of(error, self.step_id) if self.resets else None
            if failed is None:
                raise
            replies.send([msgspec.msgpack.encode(failed)], Reply.STEP_FAILED)
            return
        output.received_ns, output.launched_ns = self.received_ns, self.launched_ns
        replies.send(output.encode(), Reply.OUTPUT)


@dataclass(frozen=True, slots=True)
class Answering(Outgoing):
    """The answer to a call."""

    answer: CallAnswer

    @property
    def ready(self) -> bool:
        """True: the answer is there."""
        return True

    def send(self, replies: RingWriter) -> None:
        """Send the answer."""
        replies.send([encode(self.answer)], Reply.ANSWER)


@dataclass(frozen=True, slots=True)
class Saying(Outgoing):
    """A short message that is there."""

    kind: Reply
    data: bytes = b""

    @property
    def ready(self) -> bool:
        """True: the message is there."""
        return True

    def send(self, replies: RingWriter) -> None:
        """Send the message."""
        replies.send([self.data], self.kind)


class OutputDrain:
    """Sends messages in order: from the main thread as long as it has time, else from a thread.

    That thread may wait for the device.
    """

    def __init__(self, replies: RingWriter) -> None:
        self._replies = replies
        self._looked_at: deque[Outgoing] = deque()
        """Messages that the main thread looks at; none of them belongs to the waiting thread."""
        self._queue: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()
        # Two counts, each changed by one thread alone.
        self._num_left = 0
        self._num_waited_for = 0
        threading.Thread(target=self._run, name="drain", daemon=True).start()

    def put(self, message: Outgoing) -> None:
        """Add the next message."""
        self._looked_at.append(message)
        self.send_ready()

    @property
    def looks(self) -> bool:
        """Whether the main thread looks at a message, or waits for the thread to send one."""
        return bool(self._looked_at) or self._num_left != self._num_waited_for

    def send_ready(self) -> bool:
        """Send the messages that can be sent without waiting; return whether there were any."""
        sent = False
        while (
            self._looked_at and self._num_left == self._num_waited_for and self._looked_at[0].ready
        ):
            self._looked_at.popleft().send(self._replies)
            sent = True
        return sent

    def wait_for_rest(self) -> None:
        """Leave the rest to the thread, since the main thread is about to block."""
        while self._looked_at:
            self._num_left += 1
            self._queue.put(self._looked_at.popleft())

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            try:
                message.send(self._replies)
            except Exception:
                # A device reports a failed kernel at the next wait, which is here.
                report(self._replies, failure_text())
                return
            self._num_waited_for += 1


def report(replies: RingWriter, text: str) -> None:
    """Report to the core why this worker fails."""
    replies.send([msgspec.json.encode(Failure(text, time.monotonic_ns()))], Reply.FAILED)


def load_runner(args: WorkerProcArgs) -> Runner:
    """Return the runner of the device that was asked for, or that was found, loaded."""
    device = args.worker.parallel.device
    if device != "fake":
        if device != "cpu" and has_driver():
            begin_beside_torch(args.worker)
        import_torch()
        with uncollected_imports():
            import torch

            from sidestep.executor.models.model_loading import pick_device

        torch.set_num_threads(args.cpu_threads)
        wait_for_end(args.worker.after)
        device = pick_device(args.worker).type
    with uncollected_imports():
        load = registry.load(registry.RUNNERS[device])
    runner: Runner = load(args.worker)
    return runner


def begin_beside_torch(args: WorkerArgs) -> None:
    """Begin slow work in C, in threads beside this thread's import of torch."""
    threading.Thread(target=_begin_context, args=(args,), daemon=True).start()
    threading.Thread(target=compute_key, daemon=True).start()


def _begin_context(args: WorkerArgs) -> None:
    wait_for_end(args.after)
    begin_context(args.gpu_index)


def main(raw: bytes) -> None:
    """Run the process."""
    args = decode_args(raw, WorkerProcArgs)
    faults = faults_of(args.worker)
    replies = FaultyWriter(args.replies, faults) if faults else RingWriter(args.replies)
    try:
        runner = load_runner(args)
    except EngineStartError as error:
        report(replies, str(error))
        return
    except Exception:
        report(replies, failure_text())
        raise
    try:
        replies.send([msgspec.json.encode(runner.ready)], Reply.READY)
        freeze_heap()
        steps = RingReader(args.steps, args.reader)
        if faults:
            runner = FaultyRunner(runner, faults)
            steps = FaultyReader(args.steps, args.reader, faults)
        resets = Resets.of(args.worker)
        run_steps(runner, steps, replies, answers=args.worker.answers, resets=resets)
    except RingClosed:
        pass  # the core has ended
    except Exception:
        report(replies, failure_text())
        raise


def run_steps(
    runner: Runner,
    steps: RingReader,
    replies: RingWriter,
    *,
    answers: bool,
    resets: Resets = Resets.NEVER,
) -> None:
    """Run steps and answer calls until the core closes the ring. Only one rank sends outputs.

    Masks that the runner does not ask for are dropped: this stage comes before the last, or the
    step has failed. resets: whether the worker may go on after an exception in a step.
    """
    drain, calls = OutputDrain(replies), deque[SentCall]()
    num_steps, has_failed = 0, False
    while True:
        while calls:
            drain.put(Answering(runner.answer(calls.popleft())))
        wait_for_step(runner, steps, drain)
        message = steps.receive()
        if message is None or message[0] == Order.MASKS:
            continue
        if message[0] == Order.CALL:
            calls.append(decode_call(message[1]))
            continue
        if message[0] == Order.RESET:
            reset(runner, drain)
            has_failed = False
            continue
        received = time.monotonic_ns()
        step = StepInput.decode(message[1])
        if step.step_id != num_steps:
            raise MessageLostError(f"step {step.step_id} has come in the place of {num_steps}")
        num_steps += 1
        if has_failed:  # the core will take this step back
            continue
        if step.awaits_masks:  # the step's bytes must outlive the arrival of the next message
            step = StepInput.decode(bytes(message[1]))
        try:
            pending = runner.execute(step, lambda: receive_masks(runner, steps, drain, calls))
        except StepAbandonedError:
            reset(runner, drain)
            continue
        except Exception as error:
            place = runner.place if resets is Resets.ALIKE else 0
            failed = None if resets is Resets.NEVER else failure_of(error, step.step_id, place)
            if failed is None:
                raise
            drain.put(Saying(Reply.STEP_FAILED, msgspec.msgpack.encode(failed)))
            has_failed = True
            continue
        if answers:
            is_alone = resets is Resets.ALONE
            drain.put(Launched(pending, step.step_id, received, time.monotonic_ns(), is_alone))


def reset(runner: Runner, drain: OutputDrain) -> None:
    """Forget all requests, and tell the core behind all outputs of earlier steps."""
    runner.reset()
    drain.put(Saying(Reply.RESET))


def receive_masks(
    runner: Runner, steps: RingReader, drain: OutputDrain, calls: deque[SentCall]
) -> StepMasks:
    """Return the masks of the step that is being launched.

    They cannot come before the output of the step before has left. Calls that come before them are
    added to `calls`: they are answered after the step. Raises StepAbandonedError if the core takes
    the step back, because the step before it has failed.
    """
    while True:
        message = steps.receive()
        if message is None:
            wait_for_step(runner, steps, drain)
        elif message[0] == Order.CALL:
            calls.append(decode_call(message[1]))
        elif message[0] == Order.RESET:
            raise StepAbandonedError
        else:
            if message[0] != Order.MASKS:
                raise MessageLostError("the next step has come in the place of a step's masks")
            return StepMasks.decode(message[1])


def wait_for_step(runner: Runner, steps: RingReader, drain: OutputDrain) -> None:
    """Look for a step and for outputs in turn, for a bounded time; then block.

    Looking answers in microseconds. Waking a thread that waits takes tens of microseconds, several
    times on the way from one step to the next, and the driver may take milliseconds to wake one
    that waits for the device. So while a long step runs, this thread looks between short sleeps.
    """
    until = time.perf_counter() + SPIN_S
    while SPIN_S and not steps.has_message:
        if drain.send_ready():
            until = time.perf_counter() + SPIN_S
        elif (late := time.perf_counter() - until) > 0:
            if late > _DOZE_S or not drain.looks:
                break
            time.sleep(_NAP_S)
    if not steps.has_message:
        drain.wait_for_rest()
        if not steps.wait(_IDLE_S):
            runner.settle()
            steps.wait()
