"""A core in the place of one that has died waits for the old processes, and asks about devices."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from sidestep.engine_core import start_again
from sidestep.engine_core.start_again import obstacle_to
from sidestep.executor.base import Executor
from sidestep.ipc.processes.core_args import StartAgain


class Devices:
    """The part of an executor that knows its devices."""

    def __init__(self, need: str | None = None) -> None:
        self.need = need
        self.asked = threading.Event()

    def what_devices_need(self) -> str | None:
        self.asked.set()
        return self.need


def obstacle(devices: Devices, *pids: int) -> Any:
    return obstacle_to(StartAgain(1, 0.0, pids), cast(Executor, devices))


def test_devices_are_asked_when_the_old_processes_have_ended() -> None:
    old = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    devices, found = Devices(), list[Any]()
    waiting = threading.Thread(target=lambda: found.append(obstacle(devices, old.pid)))
    waiting.start()
    assert not devices.asked.wait(0.1)
    old.kill()
    waiting.join()
    assert devices.asked.is_set() and found == [None]
    old.communicate()


def test_a_device_that_needs_an_operator_is_final() -> None:
    dead = obstacle(Devices("GPU 0 needs a reset"))
    assert dead.cause == "GPU 0 needs a reset" and dead.is_final


def test_a_process_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_again, "_END_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as old:
        dead = obstacle(devices := Devices(), old.pid)
        assert f"process {old.pid} " in dead.cause and not dead.is_final
        assert not devices.asked.is_set()
        old.kill()


def test_a_first_start_waits_for_nothing() -> None:
    assert obstacle_to(None, cast(Executor, Devices("a reset"))) is None
