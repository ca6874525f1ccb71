"""Run a server: listen once the engine serves, drain at SIGTERM, and end with the engine.

A drain has two parts. During --drain-grace /ready answers 503 and requests are taken as before, as
load balancers notice it late. Then new requests are refused, and the running ones get
--shutdown-timeout.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from types import FrameType

import uvicorn

from sidestep.frontend.options.serve_options import Keys
from sidestep.frontend.server.app import make_app
from sidestep.frontend.server.processes.api_processes import ApiProcesses
from sidestep.frontend.server.processes.listening import LAST_SENDS_S, config_of, url_of
from sidestep.frontend.server.processes.metrics_server import MetricsServer
from sidestep.frontend.server.processes.service_manager import ServiceManager
from sidestep.frontend.server.service.service import Service
from sidestep.ipc.common.errors import EngineDeadError, SidestepError
from sidestep.ipc.common.logs import tell

_COLLECT = (50_000, 20, 100)
"""Thresholds of the garbage collector for its three generations.

The first one counts new objects; the others count collections of the generation before."""


class Server(uvicorn.Server):
    """uvicorn server that drains before it shuts down."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        others: ApiProcesses | None = None,
        metrics: MetricsServer | None = None,
    ) -> None:
        """Make a server that is not started.

        others: the server's other processes, which end before this one does. metrics: a server that
        starts and ends with this one.
        """
        super().__init__(config)
        self.service = service
        self._others = others
        self._metrics = metrics
        self.manager: ServiceManager | None = None
        """Service manager that hears of the server's life."""
        self._ends: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.listens = asyncio.Event()
        self.num_aborted = 0
        """Number of requests that the drain has aborted, as they took too long."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to take connections."""
        await super().startup(sockets)
        if self._metrics is not None:
            self._metrics.begin()
        self.listens.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at once at the second."""
        self._loop.call_soon_threadsafe(self.end, self.service.is_ending)

    def end(self, at_once: bool = False) -> None:
        """Drain, and end when the running requests have ended.

        at_once: end now, and abort the running requests.
        """
        if at_once:
            self.force_exit = self.should_exit = True
            # Their requests end without an answer, like those of clients that have gone.
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        elif self._ends is None:
            if self.manager is not None:
                self.manager.stopping()
            self._ends = asyncio.create_task(self._drain())

    async def wait_requests(self) -> None:
        """Wait until no request is left, for at most `LAST_SENDS_S` seconds.

        Then end the server of metrics.
        """
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=LAST_SENDS_S)
        if self._metrics is not None:
            await self._metrics.end()

    async def _drain(self) -> None:
        if self._others is not None:
            self._others.drain()
        args = self.service.args
        self.num_aborted = await self.service.drain(args.drain_grace, args.shutdown_timeout)
        if self._others is not None:
            await self._others.wait_ended()
        self.should_exit = True


def make_server(
    service: Service,
    keys: Keys,
    version: str,
    others: ApiProcesses | None = None,
    metrics: socket.socket | None = None,
) -> Server:
    """Return a server that is not started. metrics: the socket of --metrics-port.

    Raises ValidationError for certificates that cannot be used.
    """
    return Server(
        config_of(make_app(service, keys, version), service.args),
        service,
        others,
        None if metrics is None else MetricsServer(service, version, metrics),
    )


async def serve(
    service: Service,
    keys: Keys,
    version: str,
    listener: socket.socket,
    metrics: socket.socket | None = None,
) -> EngineDeadError | None:
    """Serve until a signal or the engine's death; return the death's error, else None.

    With --api-server-count the other processes have joined before the first request is taken, and
    have ended when this returns. Raises SidestepError if one of them cannot be started or replaced,
    and if the server has ended before its requests.
    """
    if service.args.api_server_count == 1:
        return await run(make_server(service, keys, version, None, metrics), listener)
    others = ApiProcesses(service, keys, version, listener)
    try:
        await others.start()
        server = make_server(service, keys, version, others, metrics)
        others.on_failure = server.end
        others.serve()
        dead = await run(server, listener)
        if dead is not None:
            await others.wait_ended()  # they answer their clients with the error first
    finally:
        await others.close()
    if others.failure is not None:
        raise others.failure
    if others.cut_short and dead is None:
        raise SidestepError("a process of the server has ended before its requests")
    return dead


async def run(
    server: Server, listener: socket.socket, announce: bool = True
) -> EngineDeadError | None:
    """Serve with this process until a signal or the engine's death; return the death's error.

    announce: print the address of the server, and tell the service manager. Raises SidestepError if
    the process has ended before its requests, unless a second signal asked for that.
    """
    service, dead = server.service, list[EngineDeadError]()

    async def watch() -> None:
        dead.append(await service.llm.wait_dead())
        server.should_exit = True  # the running requests have failed with the error already

    watchers = [asyncio.create_task(watch())]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        listening = asyncio.create_task(server.listens.wait())
        await asyncio.wait((listening, serving), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if announce:
            _announce(service, listener)
            server.manager = ServiceManager.of_environment()
            server.manager.ready()
            watchers.append(
                asyncio.create_task(server.manager.feed_watchdog(service.llm.check_health))
            )
        # The objects that exist now stay, so the collector need not visit them again while it
        # serves.
        gc.collect()
        gc.freeze()
        # Collect less often than after every few hundred new objects: one body may make half a
        # million.
        gc.set_threshold(*_COLLECT)
        await serving
        await server.wait_requests()
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    if server.num_aborted and not dead:
        raise SidestepError(f"the server has ended before {server.num_aborted} of its requests")
    return dead[0] if dead else None


def _announce(service: Service, listener: socket.socket) -> None:
    scheme = "https" if service.args.ssl_certfile else "http"
    tell(f"serving {service.names[0]} at {url_of(listener, scheme)}")
