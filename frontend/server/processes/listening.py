"""The sockets that a server listens at, and how it speaks HTTP there."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

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
