"""A server as users run it: a process of its own, used over a socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

Answer = TypeVar("Answer")

ROOT = Path(__file__).resolve().parents[2]
START_S = 90
"""Seconds that a server may take to start; less than a test may take in all."""
END_S = 60
"""Seconds that a server may take to end after a signal."""
ANSWER_S = 60.0
"""Seconds that a client waits for an answer. It then fails before its test is ended."""
LIMIT_S = 60.0
"""Seconds that a state may take to come. A busy machine needs some; a hang takes all."""


class LiveServer:
    """`sidestep serve` on a free port. `close` ends it with all its processes.

    Its messages are read as they come: a server whose messages nobody reads would block when the
    pipe is full.
    """

    def __init__(
        self,
        *words: str,
        environment: dict[str, str] | None = None,
        scheme: str = "http",
        key: str | None = None,
        verify: Any = True,
    ) -> None:
        command = [sys.executable, "-m", "sidestep", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        self._lines: list[str] = []
        self._answered = threading.Event()
        """Set when the server has started, or cannot start."""
        self._url: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._until_started()
        self.port = int(self.url.rpartition(":")[2])
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(
            base_url=self.url, headers=headers, verify=verify, timeout=ANSWER_S
        )

    @property
    def log(self) -> str:
        """The messages that it has printed so far; all of them once `wait` has returned."""
        return "".join(self._lines)

    def forget_log(self) -> None:
        """Drop the messages that have come."""
        self._lines.clear()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as messages:
            for line in messages:
                self._lines.append(line)
                found = re.search(r"serving \S+ at ([^\s\"]+)", line)
                if found is not None and self._url is None:
                    self._url = found[1]
                    self._answered.set()
        self._answered.set()

    def _until_started(self) -> str:
        self._answered.wait(START_S)
        if self._url is None:
            self.process.kill()
            self.process.wait(END_S)
            raise AssertionError(f"the server has not started: {self.log}")
        return self._url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> int:
        """End the server and return its exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until it has ended by itself, and return its exit status.

        `log` then has all that it has printed.
        """
        try:
            status = self.process.wait(END_S)
            self._reader.join(END_S)
            assert not self._reader.is_alive(), "a process of the server has outlived it"
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server has not ended: {self.log}") from None
        return status

    # Requests.

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx2.Response:
        """Send one request. A body that is bytes is sent as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(
            path, content=content, headers={"content-type": "application/json", **headers}
        )

    def load(self) -> dict[str, Any]:
        """Return the server's load."""
        answer: dict[str, Any] = self.http.get("/v1/load").raise_for_status().json()
        return answer

    def until_idle(self, limit_s: float = LIMIT_S) -> None:
        """Return when nothing runs and all KV blocks are free, as the engine itself reports.

        The load is requested again and again.
        """
        self.until(lambda load: not any(load.values()), limit_s)

    def until(self, condition: Any, limit_s: float = LIMIT_S) -> None:
        """Return when the load is as wanted."""
        until(lambda: condition(self.load()), limit_s)

    def metrics(self) -> dict[str, float]:
        """Return every sample's name and labels, and its value.

        The model's label and the first replica's label are left out.
        """
        samples = {}
        for line in self.http.get("/metrics").raise_for_status().text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = (
                    re.sub(r'(model_name="[^"]*"|engine="0"),?', "", name)
                    .replace(",}", "}")
                    .replace("{}", "")
                )
                samples[name] = float(value)
        return samples

    def connect(self) -> socket.socket:
        """Return a bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S)


def until(ask: Callable[[], Answer | None], limit_s: float = LIMIT_S) -> Answer:
    """Ask again and again until the answer is true, and return it; fail after the limit."""
    end = time.monotonic() + limit_s
    while not (answer := ask()):
        assert time.monotonic() < end, "the state has not come"
    return answer


def raw_request(path: str, body: bytes, **headers: str) -> bytes:
    """Return a request's bytes."""
    fields = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def read_all(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def read_until(connection: socket.socket, mark: bytes, times: int = 1) -> bytes:
    """Return the bytes up to the `times`th mark, and what has come with it.

    Raises AssertionError if the other side closes before.
    """
    data = b""
    while data.count(mark) < times:
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return data
