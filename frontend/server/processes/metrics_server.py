"""The server at --metrics-port: metrics and probes for programs that have no API key.

It runs beside the server of requests in the first process, speaks plain HTTP, and ends last, so
that a drain can be watched.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from sidestep.frontend.server.app import make_metrics_app
from sidestep.frontend.server.processes.listening import config_of, url_of
from sidestep.frontend.server.service.service import Service
from sidestep.ipc.common.logs import tell


class MetricsServer(uvicorn.Server):
    """uvicorn server that leaves signals to the server of requests."""

    def __init__(self, service: Service, version: str, listener: socket.socket) -> None:
        """Make a server that is not started. listener: a bound socket."""
        plain = replace(service.args, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None)
        super().__init__(config_of(make_metrics_app(service, version), plain))
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def begin(self) -> None:
        """Start to serve, and print the address."""
        self._serving = asyncio.create_task(self.serve([self._listener]))
        tell(f"metrics at {url_of(self._listener)}/metrics")

    async def end(self) -> None:
        """End, if it was started, once the answers that are being sent are complete."""
        self.should_exit = True
        if self._serving is not None:
            await self._serving
