"""Child processes: they report how they ended, and never outlive their parent."""

import gc
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sidestep.ipc.processes.process import process_exists, spawn, uncollected_imports


def wait_until_gone(pid: int, limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while process_exists(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not process_exists(pid)


def test_death_is_reported_with_its_cause() -> None:
    causes: queue.Queue[str] = queue.Queue()
    child = spawn("victim", "tests.unit.ipc.children:wait_for_ever", None)
    child.on_death(causes.put)
    os.kill(child.pid, signal.SIGKILL)
    assert causes.get(timeout=10) == f"victim (pid {child.pid}) was killed by SIGKILL"


def test_exit_status_is_reported_also_to_one_who_asks_late() -> None:
    child = spawn("quitter", "tests.unit.ipc.children:exit_with_status", 3)
    assert child.wait(30)
    causes: queue.Queue[str] = queue.Queue()
    child.on_death(causes.put)
    assert causes.get(timeout=1) == f"quitter (pid {child.pid}) exited with status 3"


class EndedAtOnce(subprocess.Popen[bytes]):
    """A process that ends before anything can be written to it."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_death_is_reported_of_one_that_never_read_its_arguments(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", EndedAtOnce)
    child = spawn("stillborn", "tests.unit.ipc.children:wait_for_ever", "x" * size)
    causes: queue.Queue[str] = queue.Queue()
    child.on_death(causes.put)
    assert causes.get(timeout=10) == f"stillborn (pid {child.pid}) exited with status 1"
    child.stop()


@pytest.mark.parametrize("target", ["wait_for_ever", "hold_the_interpreter"])
def test_stop_ends_it_without_reporting_a_death(target: str) -> None:
    causes: queue.Queue[str] = queue.Queue()
    child = spawn("server", f"tests.unit.ipc.children:{target}", None)
    child.on_death(causes.put)
    child.stop()
    assert not process_exists(child.pid)
    assert causes.empty()
    child.stop()


def test_killing_a_parent_ends_its_children_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = spawn("parent", "tests.unit.ipc.children:write_pid_of_grandchild", str(pids))
    while not pids.exists():
        time.sleep(0.01)
    parent, grandchild = map(int, pids.read_text().split())
    assert process_exists(grandchild)
    os.kill(parent, signal.SIGKILL)
    assert child.wait(10)
    assert wait_until_gone(grandchild)


def test_imports_are_not_looked_through_by_the_collector() -> None:
    made: list[list[int]] = []
    try:
        with pytest.raises(ImportError), uncollected_imports():
            made.append([])
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled(), "an import that fails leaves garbage uncollected"
        assert not any(one is made[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is made[0] for one in gc.get_objects())
