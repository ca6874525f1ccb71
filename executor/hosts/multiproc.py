"""Worker processes, one a rank, on this host and on others.

All ranks get every step. The first rank that samples returns the outputs; the others send only
"ready", answers to calls and failures. A worker that dies makes a descriptor readable, so the core
wakes at once and `poll` says which rank died, where and how. Ranks wait for each other, so a rank
that dies makes others fail: see `_cause`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from sidestep.executor.base import Answered, Executor, StepFailed, WorkerReady
from sidestep.executor.hosts.host_ranks import HostRanks, Meeting, RanksJob, Said
from sidestep.executor.hosts.local_ranks import LocalRanks
from sidestep.executor.hosts.rank_answers import RankAnswers
from sidestep.executor.hosts.rank_failures import RankFailures
from sidestep.executor.processes.worker_orders import Failure, Order, Reply
from sidestep.ipc.common.errors import EngineDeadError, EngineStartError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.cpu_use import CpuUse
from sidestep.ipc.processes.rank_hosts import RankHost, tcp_address
from sidestep.ipc.transport.shm_ring import RingClosed
from sidestep.ipc.transport.worker_calls import AnyCall, SentCall, decode_answer, encode

if TYPE_CHECKING:
    from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput

_LOOK_S = 1.0
"""Seconds between two looks at hosts that have not answered yet."""
_BEAT_S, _BEATS = 1.0, 10
"""Most seconds between two reports of a relay, and least reports in the limit for stalls."""
_PATIENCE_S = 0.5
"""Seconds to look for a silently dead rank after another rank reports a failure."""


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own."""

    def __init__(
        self,
        config: EngineConfig,
        replica: int = 0,
        start: int = 0,
        hosts: Sequence[RankHost] = (),
        after: Sequence[int] = (),
    ) -> None:
        """Start nothing yet.

        start: number of times that the replica has been started before. hosts: those of the ranks,
        as in CoreArgs. after: processes of the last start, for whose end ranks wait that are all
        here before they use their devices.
        """
        self._config = config
        self._address = hosts[0].address if len(hosts) > 1 else None
        """The address of this host for the ranks of other hosts, if there are any."""
        self._world = config.parallel.num_ranks
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Where ranks meet while they start."""
        self._hosts = ranks_of(config, replica, start, hosts, after)
        self._selector = selectors.DefaultSelector()
        self._ready: dict[int, WorkerReady] = {}
        self._failures: dict[int, Failure] = {}
        self._gone: list[int] = []
        """Ranks that have ended without reporting a failure."""
        self._answers = RankAnswers(self._world, self._name)
        self._num_resets = [0] * self._world
        """By rank: resets that it has not reported yet; what comes before that is dropped."""
        self._step_failures = RankFailures(self._world)
        self._decode_output: Callable[[bytes | memoryview], StepOutput]

    def what_devices_need(self) -> str | None:
        """Return what the replica's GPUs need before they can be used again; None if nothing."""
        return "; ".join(filter(None, (host.what_devices_need() for host in self._hosts))) or None

    def launch(self) -> None:
        """Start the ranks of all hosts."""
        meeting, listener = Meeting(), None
        if self._address is None:
            self._folder = tempfile.TemporaryDirectory(prefix="sidestep-rendezvous-")
            store = os.path.join(self._folder.name, "store") if self._world > 1 else None
            meeting = Meeting(store, self._folder.name)
        elif self._config.parallel.device != "fake":  # whose ranks do not meet
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            listener = socket.create_server((self._address, 0), family=family)
            port = listener.getsockname()[1]
            meeting = Meeting(tcp_address(self._address, port), listener=listener.fileno())
        for host in self._hosts:
            host.launch(meeting)
            for fileno in host.filenos():
                self._selector.register(fileno, selectors.EVENT_READ)
        if listener is not None:
            listener.close()  # rank 0 has it

    def start(self) -> WorkerReady:
        """Wait until all workers are ready.

        The rank with the fewest KV blocks decides how many all of them use.
        """
        # It imports numpy, while the workers, launched before, import theirs.
        from sidestep.ipc.transport.step import StepOutput

        self._decode_output = StepOutput.decode
        with self._folder or contextlib.nullcontext():
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
        """Have all ranks forget all requests."""
        self._num_resets = [number + 1 for number in self._num_resets]
        self._send([], Order.RESET)

    def poll(self) -> StepOutput | StepFailed | None:
        """Return the next output if it is there."""
        output = self._hear_all()
        if output is not None:
            self._step_failures.ran(output.step_id)
            return output
        if self._has_failed:
            raise EngineDeadError(self._cause())
        return self._step_failures.take_agreed()

    def next_look(self) -> float | None:
        """Return the time until which ranks may report a step that has failed on another."""
        return self._step_failures.next_look

    def fileno(self) -> int:
        """Return the descriptor of a selector over the ranks' doorbells."""
        return int(self._selector.fileno())

    def worker_pids(self) -> list[int]:
        """Return one process id for each rank on this host."""
        return [pid for host in self._hosts for pid in host.pids()]

    def cpu_use(self) -> CpuUse:
        """Return the CPU time of all ranks, beginning with now."""
        return CpuUse((), [host.cpu_time for host in self._hosts])

    def num_refused(self) -> int:
        """Return the number of strangers' connections that relays have refused."""
        return sum(host.num_refused for host in self._hosts)

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
            self._selector.select(_LOOK_S)
            self._hear_all()
            if self._has_failed:
                raise EngineStartError(self._cause())

    def _hear_all(self) -> StepOutput | None:
        """Return the next output; handle the messages that come before it.

        All doorbells are silent after it has returned None.
        """
        for host in self._hosts:
            while (said := host.receive()) is not None:
                if (output := self._take(said, host.clock_ahead_ns)) is not None:
                    return output
        return None

    def _take(self, said: Said, ahead_ns: int) -> StepOutput | None:
        """Handle a rank's message, and return it if it is the next output.

        ahead_ns: nanoseconds by which the clock of the rank's host is ahead.
        """
        rank, kind, data = said
        if kind == Reply.OUTPUT:
            if not self._num_resets[rank]:
                output = self._decode_output(data)
                return _by_own_clock(output, ahead_ns) if ahead_ns else output
        elif kind == Reply.STEP_FAILED:
            if not self._num_resets[rank]:
                failed = msgspec.msgpack.decode(data, type=StepFailed)
                self._step_failures.take(rank, self._named(rank, failed))
        elif kind == Reply.RESET:
            self._num_resets[rank] -= 1
        elif kind == Reply.ANSWER:
            self._answers.take(rank, decode_answer(data))
        elif kind == Reply.READY:
            self._ready[rank] = msgspec.json.decode(bytes(data), type=WorkerReady)
        elif kind == Reply.FAILED:
            failure = msgspec.json.decode(bytes(data), type=Failure)
            self._failures[rank] = msgspec.structs.replace(failure, at_ns=failure.at_ns - ahead_ns)
        elif rank not in self._failures:
            self._gone.append(rank)
        return None

    def _named(self, rank: int, failed: StepFailed) -> StepFailed:
        """Return a report that begins with the rank's name."""
        return msgspec.structs.replace(failed, text=f"{self._name(rank)} failed: {failed.text}")

    def _host_of(self, rank: int) -> HostRanks:
        return next(host for host in self._hosts if rank in host.ranks)

    def _name(self, rank: int) -> str:
        """Return a rank's name for users."""
        return self._host_of(rank).job.rank_name(rank)

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
            return self._host_of(rank).death_cause(rank)
        if not self._failures:
            return ""
        rank, failure = min(self._failures.items(), key=lambda item: item[1].at_ns)
        if len(self._ready) == self._world:
            return f"{self._name(rank)} failed: {failure.text}"
        return failure.text if self._world == 1 else f"{self._name(rank)}: {failure.text}"


def ranks_of(
    config: EngineConfig,
    replica: int,
    start: int,
    hosts: Sequence[RankHost],
    after: Sequence[int] = (),
) -> list[HostRanks]:
    """Return the ranks of each host; without hosts, all ranks on this one."""
    if not hosts:
        world = config.parallel.num_ranks
        job = RanksJob(
            config=config,
            first_rank=0,
            num_ranks=world,
            replica=replica,
            start=start,
            after=tuple(after),
        )
        return [LocalRanks(job)]
    if any(host.first_rank % config.parallel.tensor_parallel_size for host in hosts):
        # GPUs of one host alone can read one another's memory.
        parallel = replace(config.parallel, disable_custom_all_reduce=True)
        config = replace(config, parallel=parallel)
    # Not at the top: it imports ZeroMQ's monitors, which ranks of this host need not wait for.
    from sidestep.executor.hosts.remote_ranks import RemoteRanks

    limit_s = config.frontend.stall_limit
    beat_s = min(_BEAT_S, limit_s / _BEATS) if limit_s else _BEAT_S
    made: list[HostRanks] = []
    for host in hosts:
        job = RanksJob(
            config=config,
            first_rank=host.first_rank,
            num_ranks=host.num_ranks,
            replica=replica,
            start=start,
            first_gpu=host.first_gpu,
            host=host.name if len(hosts) > 1 else None,
            address=host.address if len(hosts) > 1 else None,
        )
        made.append(LocalRanks(job) if host.relay is None else RemoteRanks(job, host, beat_s))
    return made


def _by_own_clock(output: StepOutput, ahead_ns: int) -> StepOutput:
    """Have an output's times be those of this host. ahead_ns: how much its clock is ahead."""
    output.start_ns -= ahead_ns
    output.end_ns -= ahead_ns
    output.received_ns -= ahead_ns
    output.launched_ns -= ahead_ns
    return output
