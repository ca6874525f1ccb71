"""A service manager such as systemd hears of a server, over a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sidestep.frontend.server.processes.service_manager import ServiceManager
from sidestep.ipc.common.errors import EngineStalledError
from sidestep.ipc.config import service_manager_of_environment
from tests.server.live import LIMIT_S, LiveServer, until

Make = Callable[..., LiveServer]


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(LIMIT_S)

    def hear(self) -> str:
        """Wait for the next message."""
        return self._socket.recv(4096).decode()

    def heard(self) -> list[str]:
        """Return the messages that have come."""
        found = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return found
        finally:
            self._socket.settimeout(LIMIT_S)

    def close(self) -> None:
        """Remove the socket."""
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """Yield a service manager at an address of either kind."""
    abstract = f"@sidestep-test-{os.getpid()}-{os.urandom(4).hex()}"
    made = Manager(abstract if request.param == "abstract" else str(tmp_path / "notify"))
    yield made
    made.close()


def test_it_hears_when_the_server_is_ready_and_when_it_ends(
    manager: Manager, make_server: Make
) -> None:
    server = make_server(environment={"NOTIFY_SOCKET": manager.address})
    # The message comes when requests are taken, not when the process has started.
    assert manager.hear() == "READY=1"
    assert server.http.get("/ready").status_code == 200
    assert manager.heard() == []  # and no watchdog is fed where there is none
    assert server.close() == 0
    assert manager.heard() == ["STOPPING=1"]


def test_the_end_is_told_when_the_grace_begins(tmp_path: Path, make_server: Make) -> None:
    manager = Manager(str(tmp_path / "notify"))
    server = make_server(
        "--drain-grace", "3600", environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}
    )
    assert manager.hear() == "READY=1"
    server.process.send_signal(signal.SIGTERM)
    assert manager.hear() == "STOPPING=1"
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    manager.close()


def test_the_watchdog_is_fed_while_the_engine_is_healthy(tmp_path: Path, make_server: Make) -> None:
    """Let the watchdog see what /health sees: a core that hangs in a process that answers."""
    manager = Manager(str(tmp_path / "notify"))
    server = make_server(
        *("--stall-limit", "0"),
        environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"},
    )
    assert [manager.hear() for _ in range(4)] == ["READY=1"] + ["WATCHDOG=1"] * 3
    core = psutil.Process(server.process.pid).children()[0]
    core.suspend()
    try:
        until(lambda: "the watchdog of the service manager gets no message" in server.log)
        manager.heard()
        assert server.http.get("/health").status_code == 503  # which takes some seconds
        assert manager.heard() == []
    finally:
        core.resume()
    assert manager.hear() == "WATCHDOG=1"
    assert server.close() == 0
    manager.close()


async def test_each_good_check_feeds_the_watchdog_and_no_bad_one_does(manager: Manager) -> None:
    checks = [True, False, True, True]

    async def check() -> None:
        if not checks:
            raise asyncio.CancelledError
        if not checks.pop(0):
            raise EngineStalledError("it stands still")

    with pytest.raises(asyncio.CancelledError):
        await ServiceManager(manager.address, 0.001).feed_watchdog(check)
    assert manager.heard() == ["WATCHDOG=1"] * 3


def test_a_service_manager_that_is_gone_ends_no_server(tmp_path: Path, make_server: Make) -> None:
    server = make_server(environment={"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    assert server.http.get("/ready").status_code == 200
    assert server.close() == 0
    assert "the service manager did not get READY=1" in server.log


def test_the_watchdog_of_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert service_manager_of_environment() == ("/run/notify", 60.0)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert service_manager_of_environment() == ("/run/notify", 60.0)
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert service_manager_of_environment() == ("/run/notify", None)
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert service_manager_of_environment() == (None, None)
