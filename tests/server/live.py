"""A server as users run it: a process of its own, used over a socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

ROOT = Path(__file__).resolve().parents[2]


class LiveServer:
    """`sidestep serve` on a free port. `close` ends it with all its processes."""

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
        self.log = ""
        self.url = self._read_url()
        self.port = int(self.url.rpartition(":")[2])
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=self.url, headers=headers, verify=verify, timeout=60)

    def _read_url(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if (found := re.search(r"serving \S+ at ([^\s\"]+)", line)) is not None:
                return found[1]
        raise AssertionError(f"the server has not started: {self.log}")

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

        The text that it has printed since then goes to `log`.
        """
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.log += self.process.stderr.read()
            self.process.stderr.close()
        return self.process.wait(60)

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

    def until_idle(self, limit_s: float = 30.0) -> None:
        """Return when nothing runs and all KV blocks are free, as the engine itself reports.

        The load is requested again and again.
        """
        self.until(lambda load: not any(load.values()), limit_s)

    def until(self, condition: Any, limit_s: float = 30.0) -> None:
        """Return when the load is as wanted."""
        end = time.monotonic() + limit_s
        while not condition(load := self.load()):
            assert time.monotonic() < end, load

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
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


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
