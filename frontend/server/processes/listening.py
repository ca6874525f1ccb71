"""The sockets that a server listens at, and how it speaks HTTP there."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.server.transport.http_protocol import BoundedHttpProtocol, FileWatch
from sidestep.ipc.common.errors import ValidationError

LAST_SENDS_S = 2
"""Seconds in which clients can read complete answers before their connections are closed."""
_KEEP_ALIVE_S = 75
"""Seconds for which an idle connection is kept, which is longer than clients keep one.

So the client closes an idle connection first, and no request meets a connection that closes."""


def bind(args: ServerArgs) -> socket.socket:
    """Return a socket that is bound to the address of the server.

    Raises ValidationError, so that an address in use is known before the engine starts.
    """
    return _bind(args.host, args.port, "port")


def bind_metrics(args: ServerArgs) -> AbstractContextManager[socket.socket | None]:
    """Return a socket that is bound to --metrics-port, as a context; None without the option.

    Raises ValidationError for an address in use.
    """
    if args.metrics_port is None:
        return nullcontext()
    return _bind(args.host, args.metrics_port, "metrics_port")


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a socket that is bound."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(host: str, port: int, name: str) -> socket.socket:
    """Return a bound socket. name: the option with the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ValidationError(
            name if port else "host", f"cannot listen at {host}:{port}: {error.strerror}"
        ) from None
    made.setblocking(False)
    return made


def check_certificates(args: ServerArgs) -> None:
    """Raise ValidationError for certificates that cannot be used, before the engine starts."""

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer no request."""

    if args.ssl_certfile is not None:
        config_of(nothing, args)


def config_of(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """Return uvicorn's configuration of a server.

    Raises ValidationError for certificates that cannot be used.
    """
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
            timeout_graceful_shutdown=LAST_SENDS_S,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=2 if args.ssl_ca_certs else 0,
        )
        config.load()
    except OSError as error:
        raise ValidationError("ssl_certfile", f"cannot be used: {error}") from None
    return config
