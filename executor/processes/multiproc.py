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
from collections.abc import Iterable

import msgspec

from sidestep.executor.base import Answered, Executor, StepFailed, WorkerReady
from sidestep.executor.gpu.cuda_driver import has_driver
from sidestep.executor.processes.gpu_recovery import load_nvml, what_gpus_need
from sidestep.executor.processes.kernel_compiler import CompilerArgs
from sidestep.executor.processes.rank_answers import RankAnswers
from sidestep.executor.processes.worker import Failure, Order, Reply, WorkerProcArgs
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineDeadError, EngineStartError
from sidestep.ipc.config import (
    EngineConfig,
    available_cores,
    exact_products_environment,
    visible_gpus_of_environment,
)
from sidestep.ipc.processes.process import Child, spawn
from sidestep.ipc.transport.shm_ring import (
    DEFAULT_SLOTS,
    RingClosed,
    RingDamagedError,
    RingReader,
    RingSpec,
    RingWriter,
    create_ring,
)
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from sidestep.ipc.transport.worker_calls import AnyCall, SentCall, decode_answer, encode

_THREAD_WIDTH = 256
"""Values of a hidden state for each thread: waking a thread for fewer takes longer than it
saves."""
_PATIENCE_S = 0.5
"""Seconds to look for a silently dead rank after another rank reports a failure."""


class MultiprocExecutor(Executor):
    """Runs each rank in a process of its own."""

    def __init__(self, config: EngineConfig, replica: int = 0, start: int = 0) -> None:
        """Start nothing yet. start: number of times that the replica has been started before."""
        self._config = config
        self._replica = replica
        self._start = start
        self._world = config.parallel.num_ranks
        self._children: list[Child] = []
        self._replies: list[RingReader] = []
        self._selector = selectors.DefaultSelector()
        self._steps: RingWriter | None = None
        self._ready: dict[int, WorkerReady] = {}
        self._failures: dict[int, Failure] = {}
        self._gone: list[int] = []
        """Ranks that have ended without reporting a failure."""
        self._compiler: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Where ranks meet while they start."""
        self._answers = RankAnswers(self._world, config.parallel.rank_name)
        self._num_resets = 0
        """Resets that the worker has not reported yet; what comes before that is dropped."""

    def what_devices_need(self) -> str | None:
        """Return what the replica's GPUs need before they can be used again; None if nothing."""
        if self._config.parallel.device not in ("auto", "cuda") or not has_driver():
            return None
        visible = visible_gpus_of_environment()
        own = range(self._replica * self._world, (self._replica + 1) * self._world)
        names = map(str, own) if visible is None else visible[own.start : own.stop]
        return what_gpus_need(list(names), load_nvml())

    def launch(self) -> None:
        """Spawn the workers, and the process that compiles kernels ahead."""
        # The last stage of a pipeline reads a step long after the first one has.
        steps = create_ring(
            self._world, DEFAULT_SLOTS * self._config.parallel.pipeline_parallel_size
        )
        self._folder = tempfile.TemporaryDirectory(prefix="sidestep-rendezvous-")
        compiled, compiling = os.pipe()
        for rank in range(self._world):
            self._spawn(rank, steps, self._folder.name, compiled)
        for bell in (*steps.bells_in, compiled):
            os.close(bell)
        self._spawn_compiler(compiling)
        os.close(compiling)
        self._steps = RingWriter(steps)

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

    def _send(self, parts: Iterable[bytes | memoryview], kind: Order) -> None:
        assert self._steps is not None, "launch() comes first"
        try:
            self._steps.send(parts, kind)
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
        return [child.pid for child in self._children]

    def kill(self) -> None:
        """Kill all workers, however they hang."""
        for child in self._children:
            child.kill()

    def shutdown(self) -> None:
        """End all workers, and the process that compiles kernels ahead."""
        children = [*self._children, *([self._compiler] if self._compiler is not None else [])]
        for child in children:
            child.let_go()
        for child in children:
            child.stop()

    def _spawn(self, rank: int, steps: RingSpec, folder: str, compiled: int) -> None:
        """Spawn a rank. folder: where the ranks meet."""
        rendezvous = os.path.join(folder, "store") if self._world > 1 else None
        replies = create_ring(1)
        args = WorkerProcArgs(
            worker=WorkerArgs.of(
                self._config,
                rank=rank,
                replica=self._replica,
                start=self._start,
                rendezvous=rendezvous,
                compiled=compiled,
            ),
            steps=steps,
            reader=rank,
            replies=replies,
            cpu_threads=self._cpu_threads(),
        )
        child = spawn(
            self._config.parallel.rank_name(rank),
            "sidestep.executor.processes.worker:main",
            args,
            env=worker_environment(self._cpu_threads()),
            remove=(folder,),
            pass_fds=(*steps.reader_fds(rank), *replies.writer_fds(), compiled),
        )
        for bell in replies.bells_out:
            os.close(bell)  # so that the last end for writing closes with the worker
        self._children.append(child)
        self._replies.append(RingReader(replies, 0))
        self._selector.register(replies.bells_in[0], selectors.EVENT_READ)

    def _spawn_compiler(self, compiling: int) -> None:
        """Spawn the process that compiles kernels ahead, if the machine may have a GPU.

        When the process ends, this end of the pipe closes.
        """
        if self._config.parallel.device in ("auto", "cuda") and has_driver():
            args = CompilerArgs(
                worker=WorkerArgs.of(
                    self._config, rank=0, replica=self._replica, start=self._start
                ),
                num_processes=available_cores(),
            )
            self._compiler = spawn(
                "kernel compiler",
                "sidestep.executor.processes.kernel_compiler:main",
                args,
                env={"OMP_NUM_THREADS": "1"},
                pass_fds=(compiling,),
            )

    def _cpu_threads(self) -> int:
        if self._config.parallel.cpu_threads:
            return self._config.parallel.cpu_threads
        ranks = self._world * self._config.parallel.data_parallel_size
        worth_sharing = self._config.spec.hidden_size // _THREAD_WIDTH
        return max(1, min(available_cores() // ranks, worth_sharing))

    def _wait_ready(self) -> None:
        """Wait until all ranks have loaded, or one cannot."""
        while len(self._ready) < self._world:
            self._selector.select()
            self._hear_all()
            if self._has_failed:
                raise EngineStartError(self._cause())

    def _hear_all(self) -> StepOutput | StepFailed | None:
        """Return the next output; handle the ranks' other messages that come before it."""
        for rank in range(len(self._replies)):
            if (output := self._hear(rank)) is not None:
                return output
        return None

    def _hear(self, rank: int) -> StepOutput | StepFailed | None:
        """Return a rank's next output or failed step, and take all that it has sent before that.

        Its doorbell is silent afterwards, so nothing may be left in the ring.
        """
        replies = self._replies[rank]
        closed = replies.clear_bell()
        while (message := self._receive(rank)) is not None:
            kind, data = message
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
            else:
                self._failures[rank] = msgspec.json.decode(bytes(data), type=Failure)
        if closed and rank not in self._failures and rank not in self._gone:
            self._gone.append(rank)
        return None

    def _named(self, rank: int, failed: StepFailed) -> StepFailed:
        """Return a report that begins with the rank's name."""
        name = self._config.parallel.rank_name(rank)
        return msgspec.structs.replace(failed, text=f"{name} failed: {failed.text}")

    def _receive(self, rank: int) -> tuple[int, memoryview] | None:
        """Return a rank's next message. A message that was damaged ends the engine."""
        try:
            return self._replies[rank].receive()
        except RingDamagedError as damage:
            name = self._config.parallel.rank_name(rank)
            raise EngineDeadError(f"the core cannot go on with {name}: {damage}") from None

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
            child = self._children[self._gone[0]]
            child.wait(2.0)
            return child.death_cause()
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


def worker_environment(cpu_threads: int) -> dict[str, str]:
    """Return the environment variables that a rank's libraries read when they are loaded."""
    return {
        "OMP_NUM_THREADS": str(cpu_threads),
        # Bounded spinning: by default OpenMP's threads spin at each barrier. Where the frontend and
        # the core need the same cores, that costs more than half of the throughput.
        "GOMP_SPINCOUNT": "100",
        **exact_products_environment(),
        # Keep freed memory. Otherwise each large temporary is mapped, faulted in page by page and
        # unmapped again.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
        "MALLOC_TOP_PAD_": str(1 << 26),
        # Bound the compiled products that are kept, one for each number of rows: each takes some
        # hundreds of KB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        # The KV cache fills the GPU. Without this, steps of ever new sizes end in a search for free
        # pieces, for which the device must stop.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # torch sets the same, but after the context has been made (executor/processes/worker.py).
        "CUDA_MODULE_LOADING": "LAZY",
    }
