"""A worker process: one rank's runner between two rings.

Order of side effects: a step is decoded, its differences applied and its work launched before the next is read, so
steps reach the device in the order they were sent. Outputs go back in that order too: from this thread when the device
computes inside `execute` and nothing is outstanding, else from the drain thread, so that the main thread never waits
for the device.
"""

from __future__ import annotations

import enum
import queue
import threading
import traceback
from dataclasses import dataclass

import msgspec

from sidestep.executor.runner import PendingOutput, Runner, WorkerArgs
from sidestep.ipc import registry
from sidestep.ipc.errors import EngineStartError
from sidestep.ipc.process import decode_args, freeze_heap
from sidestep.ipc.shm_ring import RingClosed, RingReader, RingSpec, RingWriter
from sidestep.ipc.step import StepInput


class Reply(enum.IntEnum):
    """Kinds of message from a worker to the core."""

    READY = 0
    """JSON of WorkerReady."""
    OUTPUT = 1
    """Columns of StepOutput."""
    START_FAILED = 2
    """One line of text for the user: it could not start."""
    FAILED = 3
    """Text: a step raised."""


@dataclass(frozen=True, kw_only=True)
class WorkerProcArgs:
    """What the process gets as JSON."""

    worker: WorkerArgs
    steps: RingSpec
    reader: int
    replies: RingSpec
    cpu_threads: int


class Drain:
    """Sends outputs in order, waiting for the device in a thread of its own."""

    def __init__(self, replies: RingWriter) -> None:
        self._replies = replies
        self._queue: queue.SimpleQueue[PendingOutput] = queue.SimpleQueue()
        self._outstanding = 0
        threading.Thread(target=self._run, name="drain", daemon=True).start()

    def put(self, pending: PendingOutput) -> None:
        """Sends now if that keeps the order and waits for nothing, else hands over to the thread."""
        if self._outstanding == 0 and pending.ready:
            self._send(pending)
            return
        self._outstanding += 1
        self._queue.put(pending)

    def _send(self, pending: PendingOutput) -> None:
        self._replies.send(pending.wait().encode(), Reply.OUTPUT)

    def _run(self) -> None:
        while True:
            pending = self._queue.get()
            try:
                self._send(pending)
            except Exception:
                # A device reports a failed kernel at the next wait, which is here.
                self._replies.send([failure_text().encode()], Reply.FAILED)
                return
            self._outstanding -= 1


def failure_text() -> str:
    """The exception being handled, for people: its last line first, then the trace."""
    trace = traceback.format_exc().strip()
    return f"{trace.splitlines()[-1]}\n{trace}"


def load_runner(args: WorkerProcArgs) -> Runner:
    """The runner with its model loaded."""
    if args.worker.runner != "fake":
        import torch

        torch.set_num_threads(args.cpu_threads)
    runner: Runner = registry.load(registry.RUNNERS[args.worker.runner])(args.worker)
    return runner


def main(raw: bytes) -> None:
    """Entry point of the process."""
    args = decode_args(raw, WorkerProcArgs)
    replies = RingWriter(args.replies)
    try:
        runner = load_runner(args)
        ready = runner.load()
    except EngineStartError as error:
        replies.send([str(error).encode()], Reply.START_FAILED)
        return
    except Exception:
        replies.send([failure_text().encode()], Reply.START_FAILED)
        raise
    replies.send([msgspec.json.encode(ready)], Reply.READY)
    freeze_heap()
    try:
        run_steps(runner, RingReader(args.steps, args.reader), replies, answers=args.worker.rank == 0)
    except RingClosed:
        pass  # the core has ended
    except Exception:
        replies.send([failure_text().encode()], Reply.FAILED)
        raise


def run_steps(runner: Runner, steps: RingReader, replies: RingWriter, *, answers: bool) -> None:
    """The loop. Only one rank answers: all ranks sample the same tokens."""
    drain = Drain(replies)
    while True:
        steps.wait()
        message = steps.receive()
        if message is None:
            continue
        pending = runner.execute(StepInput.decode(message[1]))
        if answers:
            drain.put(pending)
