"""One server's life: it listens once the engine serves, drains at SIGTERM, and ends with the
engine.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.app import make_app
from sidestep.frontend.server.processes.api_processes import ApiProcesses
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.http_protocol import BoundedHttpProtocol, FileWatch
from sidestep.ipc.common.errors import EngineDeadError, ValidationError
from sidestep.ipc.common.logs import tell

_COLLECT = (50_000, 20, 100)
"""Thresholds of the garbage collector: new objects before it looks at the youngest generation, and
how often it looks at the next ones."""
_LAST_SENDS_S = 2
"""For answers that are complete, to clients that read slowly, before connections are closed."""
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: who closes one first must not be the one who is just
being asked."""


def bind(args: ServerArgs) -> socket.socket:
    """The socket to listen at. Raises ValidationError: an address in use is known before the engine
    starts.
    """
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((args.host, args.port))
    except OSError as error:
        made.close()
        raise ValidationError(
            "port" if args.port else "host",
            f"cannot listen at {args.host}:{args.port}: {error.strerror}",
        ) from None
    made.setblocking(False)
    return made


class Server(uvicorn.Server):
    """uvicorn's, which drains before it shuts down."""

    def __init__(
        self, config: uvicorn.Config, service: Service, others: ApiProcesses | None = None
    ) -> None:
        """others: the server's other processes, which end before this one does."""
        super().__init__(config)
        self.service = service
        self._others = others
        self._ends: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections are taken once this has returned."""
        await super().startup(sockets)
        self.listens.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        self._loop.call_soon_threadsafe(self.end, self.service.is_draining)

    def end(self, at_once: bool = False) -> None:
        """Takes no more requests; ends when those that run have ended."""
        if at_once:
            self.force_exit = self.should_exit = True
            # Their requests end like those of clients that have left: without an answer.
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        elif self._ends is None:
            self._ends = asyncio.create_task(self._drain())

    async def wait_requests(self) -> None:
        """Return when no request is left, but after `_LAST_SENDS_S` seconds at the latest."""
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_SENDS_S)

    async def _drain(self) -> None:
        if self._others is not None:
            self._others.drain()
        await self.service.drain(self.service.args.shutdown_timeout)
        if self._others is not None:
            await self._others.wait_ended()
        self.should_exit = True


def check_certificates(args: ServerArgs) -> None:
    """Raises ValidationError for certificates that cannot be used, before the engine starts."""

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer no request."""

    if args.ssl_certfile is not None:
        _config(nothing, args)


def make_server(
    service: Service, keys: Keys, version: str, others: ApiProcesses | None = None
) -> Server:
    """A server that is not started. Raises ValidationError for certificates that cannot be used."""
    return Server(_config(make_app(service, keys, version), service.args), service, others)


async def serve(
    service: Service, keys: Keys, version: str, listener: socket.socket
) -> EngineDeadError | None:
    """Serves until a signal, or the engine's death, which it returns. With --api-server-count the
    other processes have joined before the first request is taken, and have ended when this returns.
    Raises SidestepError if one of them cannot be started, or not again.
    """
    if service.args.api_server_count == 1:
        return await run(make_server(service, keys, version), listener)
    others = ApiProcesses(service, keys, version, listener)
    try:
        await others.start()
        server = make_server(service, keys, version, others)
        others.on_failure = server.end
        others.serve()
        dead = await run(server, listener)
        if dead is not None:
            await others.wait_ended()  # they tell their clients
    finally:
        await others.close()
    if others.failure is not None:
        raise others.failure
    return dead


async def run(
    server: Server, listener: socket.socket, announce: bool = True
) -> EngineDeadError | None:
    """One process's part of that. announce: say where it serves."""
    service, dead = server.service, list[EngineDeadError]()

    async def watch() -> None:
        dead.append(await service.llm.wait_dead())
        server.should_exit = True  # the requests that ran have been told

    watcher = asyncio.create_task(watch())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        listening = asyncio.create_task(server.listens.wait())
        await asyncio.wait((listening, serving), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if announce:
            _announce(service, listener)
        # What is there now stays: the collector need not look at it again and again while tokens
        # come and go.
        gc.collect()
        gc.freeze()
        # Look at new objects less often than after every few hundred: a body may make half a
        # million.
        gc.set_threshold(*_COLLECT)
        await serving
        await server.wait_requests()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return dead[0] if dead else None


def _announce(service: Service, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if service.args.ssl_certfile else "http"
    tell(f"serving {service.names[0]} at {scheme}://{f'[{host}]' if ':' in host else host}:{port}")


def _config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    protocol = type(
        "Protocol",
        (BoundedHttpProtocol,),
        {"head_timeout": args.read_timeout, "files": FileWatch()},
    )
    try:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_SENDS_S,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=2 if args.ssl_ca_certs else 0,
        )
        config.load()
    except OSError as error:
        raise ValidationError("ssl_certfile", f"cannot be used: {error}") from None
    return config
