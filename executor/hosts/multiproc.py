"""Worker processes, one a rank, which take steps from one ring and reply on one ring each.

The first rank that samples returns the outputs. The other ranks' rings carry only "ready", answers
to calls and failures. A worker that dies makes its doorbell readable (its end of the pipe closes),
so the core wakes at once and `poll` says which rank died and how. Ranks wait for each other, so a
rank that dies makes others fail: see `_cause`.
"""

from __future__ import annotations

import os
import selectors
import tempfile
import time
from collections.abc import Sequence

import msgspec

from sidestep.executor.base import Answered, Executor, StepFailed, WorkerReady
from sidestep.executor.hosts.host_ranks import HostRanks, Meeting, RanksJob, Said
from sidestep.executor.hosts.local_ranks import LocalRanks
from sidestep.executor.hosts.rank_answers import RankAnswers
from sidestep.executor.processes.worker import Failure, Order, Reply
from sidestep.ipc.common.errors import EngineDeadError, EngineStartError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.transport.shm_ring import RingClosed
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from sidestep.ipc.transport.worker_calls import AnyCall, SentCall, decode_answer, encode

_PATIENCE_S = 0.5
"""Seconds to look for a silently dead rank after another rank reports a failure."""


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own."""

    def __init__(self, config: EngineConfig, replica: int = 0, start: int = 0) -> None:
        """Start nothing yet. start: number of times that the replica has been started before."""
        self._config = config
        self._world = config.parallel.num_ranks
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Where ranks meet while they start."""
        job = RanksJob(
            config=config,
            first_rank=0,
            num_ranks=self._world,
            replica=replica,
            start=start,
        )
        self._hosts: list[HostRanks] = [LocalRanks(job)]
        self._selector = selectors.DefaultSelector()
        self._ready: dict[int, WorkerReady] = {}
        self._failures: dict[int, Failure] = {}
        self._gone: list[int] = []
        """Ranks that have ended without reporting a failure."""
        self._answers = RankAnswers(self._world, config.parallel.rank_name)
        self._num_resets = 0
        """Resets that the worker has not reported yet; what comes before that is dropped."""

    def what_devices_need(self) -> str | None:
        """Return what the replica's GPUs need before they can be used again; None if nothing."""
        return "; ".join(filter(None, (host.what_devices_need() for host in self._hosts))) or None

    def launch(self) -> None:
        """Start the ranks of all hosts."""
        self._folder = tempfile.TemporaryDirectory(prefix="sidestep-rendezvous-")
        folder = self._folder.name
        meeting = Meeting(os.path.join(folder, "store") if self._world > 1 else None, folder)
        for host in self._hosts:
            host.launch(meeting)
            for fileno in host.filenos():
                self._selector.register(fileno, selectors.EVENT_READ)

    def start(self) -> WorkerReady:
        """Wait until all workers are ready.

        The rank with the fewest KV blocks decides how many all of them use.
        """
        assert self._folder is not None, "launch() comes first"
        with self._folder:
            self._wait_ready()
        ready = [self._ready[rank] for rank in range(self._world)]
        return WorkerReady(
            num_kv_blocks=min(r.num_kv_blocks for r in ready),
            num_states=min(r.num_states for r in ready),
            block_size=ready[0].block_size,
            device_type=ready[0].device_type,
            device=ready[0].device,
        )

    def submit(self, step: StepInput) -> None:
        """Send a step to all ranks."""
        self._send(step.encode(), Order.STEP)

    def submit_masks(self, masks: StepMasks) -> None:
        """Send masks to all ranks."""
        self._send(masks.encode(), Order.MASKS)

    def call(self, call: AnyCall) -> int:
        """Send a call to all ranks, and return its number."""
        number = self._answers.open()
        self._send([encode(SentCall(number=number, call=call))], Order.CALL)
        return number

    def take_answered(self) -> list[Answered]:
        """Return the calls that all ranks have answered since the last time."""
        return self._answers.take_answered()

    def missing_ranks(self, number: int) -> str:
        """Return the names of the ranks that have not answered a call."""
        return self._answers.missing(number)

    def _send(self, parts: Sequence[bytes | memoryview], kind: Order) -> None:
        try:
            for host in self._hosts:
                host.send(parts, kind)
        except RingClosed as closed:
            raise EngineDeadError(self._cause() or f"the workers take no steps: {closed}") from None

    def reset(self) -> None:
        """Have the only rank forget all requests."""
        self._num_resets += 1
        self._send([], Order.RESET)

    def poll(self) -> StepOutput | StepFailed | None:
        """Return the next output if it is there."""
        output = self._hear_all()
        if output is None and self._has_failed:
            raise EngineDeadError(self._cause())
        return output

    def fileno(self) -> int:
        """Return the descriptor of a selector over the ranks' doorbells."""
        return int(self._selector.fileno())

    def worker_pids(self) -> list[int]:
        """Return one process id for each rank."""
        return [pid for host in self._hosts for pid in host.pids()]

    def kill(self) -> None:
        """Kill all workers, however they hang."""
        for host in self._hosts:
            host.kill()

    def shutdown(self) -> None:
        """End all workers, and the processes that compile kernels ahead."""
        for host in self._hosts:
            host.let_go()
        for host in self._hosts:
            host.stop()

    def _wait_ready(self) -> None:
        """Wait until all ranks have loaded, or one cannot."""
        while len(self._ready) < self._world:
            self._selector.select()
            self._hear_all()
            if self._has_failed:
                raise EngineStartError(self._cause())

    def _hear_all(self) -> StepOutput | StepFailed | None:
        """Return the next output or failed step; handle the messages that come before it.

        All doorbells are silent after it has returned None.
        """
        for host in self._hosts:
            while (said := host.receive()) is not None:
                if (output := self._take(said)) is not None:
                    return output
        return None

    def _take(self, said: Said) -> StepOutput | StepFailed | None:
        """Handle a rank's message, and return it if it is the next output or failed step."""
        rank, kind, data = said
        if kind == Reply.OUTPUT:
            if not self._num_resets:
                return StepOutput.decode(data)
        elif kind == Reply.STEP_FAILED:
            if not self._num_resets:
                return self._named(rank, msgspec.msgpack.decode(data, type=StepFailed))
        elif kind == Reply.RESET:
            self._num_resets -= 1
        elif kind == Reply.ANSWER:
            self._answers.take(rank, decode_answer(data))
        elif kind == Reply.READY:
            self._ready[rank] = msgspec.json.decode(bytes(data), type=WorkerReady)
        elif kind == Reply.FAILED:
            self._failures[rank] = msgspec.json.decode(bytes(data), type=Failure)
        elif rank not in self._failures:
            self._gone.append(rank)
        return None

    def _named(self, rank: int, failed: StepFailed) -> StepFailed:
        """Return a report that begins with the rank's name."""
        name = self._config.parallel.rank_name(rank)
        return msgspec.structs.replace(failed, text=f"{name} failed: {failed.text}")

    @property
    def _has_failed(self) -> bool:
        return bool(self._failures or self._gone)

    def _cause(self) -> str:
        """Return how the failure began; empty if that is not known after some time.

        A rank that ended without a word comes first; otherwise it is the rank that reported first.
        """
        until = time.monotonic() + _PATIENCE_S
        while (
            not self._gone
            and time.monotonic() < until
            and not (self._failures and self._world == 1)
        ):
            self._hear_all()
            time.sleep(0.01)
        if self._gone:
            rank = self._gone[0]
            return next(host for host in self._hosts if rank in host.ranks).death_cause(rank)
        if not self._failures:
            return ""
        rank, failure = min(self._failures.items(), key=lambda item: item[1].at_ns)
        if len(self._ready) == self._world:
            return f"{self._config.parallel.rank_name(rank)} failed: {failure.text}"
        return (
            failure.text
            if self._world == 1
            else f"{self._config.parallel.rank_name(rank)}: {failure.text}"
        )
