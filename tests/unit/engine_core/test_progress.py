"""The core's watch of its workers: when they count as hung, and when they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sidestep.engine_core.core import EngineCore
from sidestep.engine_core.progress import Progress, WorkersStalledError
from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.ipc.processes.cpu_use import CpuUse
from sidestep.ipc.processes.process import is_running, kill_child
from sidestep.ipc.transport.worker_calls import StartProfile
from tests.fakes import SPEC, Clock, make_request, make_runner, make_scheduler
from tests.unit.engine_core.test_core import HandExecutor
from tests.unit.engine_core.test_worker_calls import ask

LIMIT_S = 10.0


class Workers(CpuUse):
    """Workers whose use of the CPU a test plays."""

    def __init__(self) -> None:
        super().__init__([])
        self.compute = False

    def has_grown(self) -> bool:
        return self.compute


class Engine:
    """A core with a request, on a clock that the test moves as the busy loop's waits do."""

    def __init__(self, workers: Workers | None = None, limit_s: float = LIMIT_S) -> None:
        self.clock, self.executor = Clock(), HandExecutor()
        scheduler = make_scheduler(clock=self.clock, overlap=True)
        self.executor.runner = make_runner(scheduler)
        self.core = EngineCore(
            scheduler,
            self.executor,
            RequestChecks(SPEC),
            max_steps_in_flight=2,
            clock=self.clock,
            progress=Progress(limit_s, self.clock, workers),
        )
        self.core.handle(make_request([1, 2, 3], 1000))
        self.core.step()

    def run(self, seconds: float) -> None:
        """Let time pass without an output."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            deadline = self.core.next_deadline()
            self.clock.now = end if deadline is None else min(end, deadline)
            self.core.step()

    def finish_step(self) -> None:
        self.executor.finish_step()
        self.core.step()


def test_workers_that_give_nothing_for_the_limit_are_killed() -> None:
    engine = Engine()
    engine.run(LIMIT_S - 0.01)
    assert not engine.executor.is_killed
    with pytest.raises(WorkersStalledError, match="made no progress for 10 s"):
        engine.run(0.02)
    assert engine.executor.is_killed


def test_every_output_is_progress() -> None:
    engine = Engine()
    for _ in range(5):
        engine.run(0.3)
        engine.finish_step()
    engine.run(LIMIT_S - 0.01)
    assert engine.core.seconds_since_progress() == pytest.approx(LIMIT_S - 0.01)


def test_the_limit_is_twenty_of_the_longest_steps_of_the_last_minute() -> None:
    engine = Engine()
    engine.run(2.0)
    engine.finish_step()
    engine.run(39.0)
    engine.finish_step()
    engine.run(700.0)  # the minute is that before the silence
    engine.finish_step()
    for _ in range(62):
        engine.run(0.25)
        engine.finish_step()
        engine.run(0.75)
        engine.finish_step()
    engine.run(14.9)
    with pytest.raises(WorkersStalledError, match="for 15 s"):
        engine.run(0.2)


def test_workers_that_compute_on_a_cpu_are_never_killed_and_are_once_they_stop() -> None:
    workers = Workers()
    engine = Engine(workers)
    workers.compute = True
    engine.run(600.0)
    assert engine.core.seconds_since_progress() <= 2.0
    workers.compute = False
    with pytest.raises(WorkersStalledError):
        engine.run(LIMIT_S + 1)


def test_time_in_which_the_core_did_not_run_does_not_count() -> None:
    """A machine that slept, or a container that was frozen."""
    engine = Engine()
    engine.run(5.0)
    engine.clock.now += 3600.0
    engine.core.step()
    assert engine.core.seconds_since_progress() == 7.0
    engine.finish_step()


def test_a_long_call_is_no_stall_and_steps_behind_it_have_their_whole_limit() -> None:
    engine = Engine()
    call = StartProfile(folder="/tmp")
    engine.run(5.0)
    ask(engine.core, call)
    engine.run(call.timeout_s - 1)
    assert engine.core.seconds_since_progress() == 0.0
    engine.executor.answer(0, {})
    engine.core.step()
    engine.run(LIMIT_S - 1.5)
    with pytest.raises(WorkersStalledError):
        engine.run(2.0)


def test_an_engine_without_steps_or_without_a_limit_waits_for_ever() -> None:
    engine = Engine(limit_s=0.0)
    engine.run(1000.0)
    assert engine.core.seconds_since_progress() > 900
    idle = Engine()
    idle.core.client_left(0)
    idle.executor.finish_step()
    idle.finish_step()
    assert not idle.core.in_flight and idle.core.next_deadline() is None


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_cpu_time_tells_a_process_that_computes_from_one_that_waits_or_is_stopped() -> None:
    spin = "import sys; print(flush=True)\nwhile True: pass"
    wait = "import sys; print(flush=True); sys.stdin.read()"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for program in (spin, wait)
    ]
    try:
        for each in both:
            assert each.stdout is not None
            each.stdout.readline()
        spins, waits = (CpuUse([each.pid]) for each in both)
        group = CpuUse([each.pid for each in both])
        while not spins.has_grown():
            pass
        while not group.has_grown():
            pass
        assert not waits.has_grown()
        both[1].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, both[1].pid, os.WSTOPPED | os.WNOWAIT)
        again = CpuUse([both[0].pid])
        while not again.has_grown():
            pass
        assert not group.has_grown(), "the other one may wait for it"
        kill_child(both[1].pid, os.getppid())
        assert is_running(both[1].pid), "another process's child"
        kill_child(both[1].pid, os.getpid())
        assert both[1].wait(60) == -signal.SIGKILL
    finally:
        for each in both:
            each.kill()
            each.communicate()
