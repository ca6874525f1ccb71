"""The ranks of this host: a process each, one ring for all their steps, and one each for replies.

A worker that dies makes its doorbell readable, because its end of the pipe closes. So the reader
wakes at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from sidestep.executor.gpu.cuda_driver import has_driver
from sidestep.executor.hosts.host_ranks import HostRanks, Meeting, RanksJob, Said
from sidestep.executor.processes.gpu_recovery import load_nvml, what_gpus_need
from sidestep.executor.processes.kernel_compiler import CompilerArgs
from sidestep.executor.processes.worker_orders import Order, Reply, WorkerProcArgs
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.config import (
    available_cores,
    exact_products_environment,
    interface_environment,
    visible_gpus_of_environment,
)
from sidestep.ipc.processes.cpu_use import CpuTime, cpu_time
from sidestep.ipc.processes.process import Child, spawn
from sidestep.ipc.transport.shm_ring import (
    DEFAULT_SLOTS,
    RingDamagedError,
    RingReader,
    RingSpec,
    RingWriter,
    create_ring,
)

_THREAD_WIDTH = 256
"""Values of a hidden state for each thread: waking a thread for fewer takes longer than it
saves."""


class LocalRanks(HostRanks):
    """Runs each rank in a child process."""

    def __init__(self, job: RanksJob) -> None:
        """Start nothing yet."""
        super().__init__(job)
        self._config = job.config
        self._children: list[Child] = []
        self._replies: list[tuple[int, RingReader]] = []
        """Each rank, and the ring of its replies."""
        self._gone: set[int] = set()
        self._steps: RingWriter | None = None
        self._compiler: Child | None = None

    def what_devices_need(self) -> str | None:
        """Ask NVML about the GPUs of these ranks."""
        if self._config.parallel.device not in ("auto", "cuda") or not has_driver():
            return None
        visible = visible_gpus_of_environment()
        first = self.job.worker_args(self.ranks.start).gpu_index
        own = range(first, first + len(self.ranks))
        names = map(str, own) if visible is None else visible[own.start : own.stop]
        return what_gpus_need(list(names), load_nvml())

    def launch(self, meeting: Meeting) -> None:
        """Spawn the workers, and the process that compiles kernels ahead."""
        # The last stage of a pipeline reads a step long after the first one has.
        steps = create_ring(
            len(self.ranks), DEFAULT_SLOTS * self._config.parallel.pipeline_parallel_size
        )
        compiled, compiling = os.pipe()
        for rank in self.ranks:
            self._spawn(rank, steps, meeting, compiled)
        for bell in (*steps.bells_in, compiled):
            os.close(bell)
        self._spawn_compiler(compiling)
        os.close(compiling)
        self._steps = RingWriter(steps)

    def send(self, parts: Sequence[bytes | memoryview], kind: Order) -> None:
        """Write a message into the ring."""
        assert self._steps is not None, "launch() comes first"
        self._steps.send(parts, kind)

    def filenos(self) -> list[int]:
        """Return the ranks' doorbells."""
        return [replies.fileno() for _, replies in self._replies]

    def receive(self) -> Said | None:
        """Return the next message, those of the first rank first."""
        for rank, replies in self._replies:
            closed = replies.clear_bell()
            try:
                message = replies.receive()
            except RingDamagedError as damage:
                name = self.job.rank_name(rank)
                raise EngineDeadError(f"the core cannot go on with {name}: {damage}") from None
            if message is not None:
                return Said(rank, *message)
            if closed and rank not in self._gone:
                self._gone.add(rank)
                return Said(rank, Reply.GONE, b"")
        return None

    def death_cause(self, rank: int) -> str:
        """Wait for the process's exit status."""
        child = self._children[rank - self.ranks.start]
        child.wait(2.0)
        return f"{child.death_cause()}{self.job.place}"

    def pids(self) -> list[int]:
        """Return one process id for each rank."""
        return [child.pid for child in self._children]

    def cpu_time(self) -> CpuTime | None:
        """Ask the system."""
        return cpu_time(self.pids())

    def kill(self) -> None:
        """Kill all workers."""
        for child in self._children:
            child.kill()

    def let_go(self) -> None:
        """Cut the lifelines, also that of the process that compiles kernels ahead."""
        for child in self._all:
            child.let_go()

    def stop(self) -> None:
        """End all processes."""
        for child in self._all:
            child.stop()

    @property
    def _all(self) -> list[Child]:
        return [*self._children, *([self._compiler] if self._compiler is not None else [])]

    def _spawn(self, rank: int, steps: RingSpec, meeting: Meeting, compiled: int) -> None:
        reader, replies = rank - self.ranks.start, create_ring(1)
        listener = meeting.listener if rank == 0 else None
        args = WorkerProcArgs(
            worker=replace(
                self.job.worker_args(rank),
                rendezvous=meeting.rendezvous,
                listener=listener,
                compiled=compiled,
            ),
            steps=steps,
            reader=reader,
            replies=replies,
            cpu_threads=self._cpu_threads(),
        )
        child = spawn(
            self._config.parallel.rank_name(rank),
            "sidestep.executor.processes.worker:main",
            args,
            env={
                **worker_environment(self._cpu_threads()),
                **interface_environment(self.job.address),
            },
            remove=() if meeting.folder is None else (meeting.folder,),
            pass_fds=(
                *steps.reader_fds(reader),
                *replies.writer_fds(),
                compiled,
                *(() if listener is None else (listener,)),
            ),
        )
        for bell in replies.bells_out:
            os.close(bell)  # so that the last end for writing closes with the worker
        self._children.append(child)
        self._replies.append((rank, RingReader(replies, 0)))

    def _spawn_compiler(self, compiling: int) -> None:
        """Spawn the process that compiles kernels ahead, if the machine may have a GPU.

        When the process ends, this end of the pipe closes.
        """
        if self._config.parallel.device in ("auto", "cuda") and has_driver():
            args = CompilerArgs(
                worker=self.job.worker_args(self.ranks.start), num_processes=available_cores()
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
        has_host = self.job.first_gpu is not None  # and the other replicas have others
        others = 1 if has_host else self._config.parallel.most_replicas
        ranks = len(self.ranks) * others
        worth_sharing = self._config.spec.hidden_size // _THREAD_WIDTH
        return max(1, min(available_cores() // ranks, worth_sharing))


def worker_environment(cpu_threads: int) -> dict[str, str]:
    """Return the environment variables that a rank's libraries read when they are loaded."""
    return {
        "OMP_NUM_THREADS": str(cpu_threads),
        # Bounded spinning, for some 30 us: by default OpenMP's threads spin at each barrier. Where
        # other programs need the same cores, that costs more than half of the throughput. A thread
        # that sleeps at once takes some 50 us to wake up, at some hundred products a step.
        "GOMP_SPINCOUNT": "2000",
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
