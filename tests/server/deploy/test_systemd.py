"""The unit for systemd starts, drains and is watched as its lines promise."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import run
from tests.server.deploy.files import DEPLOY, end_s, server_of, unit
from tests.server.live import LIMIT_S, LiveServer

FILE = DEPLOY / "systemd" / "sidestep.service"
SECONDS = {"min": 60, "s": 1}


def seconds(text: str) -> float:
    """Return a time of systemd in seconds."""
    number = text.rstrip("mins")
    return float(number) * SECONDS[text[len(number) :] or "s"]


def command() -> list[str]:
    program, *words = unit()["Service"]["ExecStart"].split()
    assert program.endswith("/sidestep")
    return words


def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = unit()["Service"]["ExecStart"].split()[0]
    copy = tmp_path / FILE.name
    copy.write_text(FILE.read_text().replace(program, "/bin/true"))
    done = run("systemd-analyze", "verify", "--recursive-errors=no", copy)
    assert done.returncode == 0 and FILE.name not in done.stdout + done.stderr, done


def test_a_drain_fits_the_time_that_systemd_waits() -> None:
    service = unit()["Service"]
    # The rest is for the engine's end and the last sends.
    assert seconds(service["TimeoutStopSec"]) >= end_s(server_of(command())) + 20
    assert service["KillMode"] == "mixed" and service["Restart"] == "on-failure"
    assert service["LimitMEMLOCK"] == "infinity"


def test_the_command_of_the_unit_reports_to_systemd(
    tmp_path: Path, make_server: Callable[..., LiveServer]
) -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    watchdog_us = round(seconds(service["WatchdogSec"]) * 1e6)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LIMIT_S)
        words = command()
        # The test does not wait for the grace.
        words[words.index("--drain-grace") + 1] = "0"
        server = make_server(
            *words[1:],
            environment={
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "WATCHDOG_USEC": str(watchdog_us),
            },
        )
        assert [manager.recv(99), manager.recv(99)] == [b"READY=1", b"WATCHDOG=1"]
        assert server.close() == 0
        assert manager.recv(99) == b"STOPPING=1"
