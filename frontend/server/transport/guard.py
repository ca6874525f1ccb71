"""Check every request before it reaches a route: its Host name, its Origin, and its key.

A browser sends the requests of any page to any server, a local one too. So requests with an
`Origin` are served only for allowed origins and for this server itself. Any name can be made to
resolve to this machine, so only `localhost` and plain addresses count as the server itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.transport.errors import ApiError
from sidestep.frontend.server.transport.hosts import is_known, known_hosts
from sidestep.frontend.server.transport.page import PATHS

OPEN_PATHS = frozenset(("/health", "/ready", *PATHS))
"""Paths that need no key: those for supervisors of the process, and those of the web page."""
TENANT = "sidestep.tenant"
"""Key of a request's scope: the public name of its API key, the first hexadecimal digits of the
key's SHA-256."""
OPERATOR = "sidestep.operator"
"""Key of a request's scope: whether the request may see the figures and requests of all users."""
HAS_OPERATOR_KEY = "sidestep.has_operator_key"
"""Key of a request's scope: whether the request has brought an operator's key."""
CACHE_SALT = "sidestep.cache_salt"
"""Key of a request's scope: the digest of its API key, when there are several keys."""
_NAME_DIGITS = 8
"""Number of digits in a key's name: enough to distinguish keys, far too few to find a key."""


class Guard:
    """ASGI layer that refuses requests before they reach the application."""

    def __init__(self, app: ASGIApp, keys: Keys, args: ServerArgs) -> None:
        self._app = app
        # All digests have one length, so comparing them reveals nothing about the length of a key.
        self._keys = [_digest(key) for key in keys.all]
        self._operators = frozenset(_digest(key) for key in keys.operators)
        self._origins = frozenset(
            origin.rstrip("/").lower() for origin in args.allowed_origins or ()
        )
        self._hosts = known_hosts(args, keys.all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, then pass it on or refuse it."""
        headers = Headers(scope=scope)
        if self._hosts is not None and not is_known(headers.get("host", ""), self._hosts):
            error = ApiError(
                403,
                f"this server is not known as {headers['host']!r}; see --allowed-hosts",
                kind="permission_error",
                code="host_not_allowed",
            )
            return await error.response()(scope, receive, send)
        origin = headers.get("origin")
        if origin is None:
            return await self._with_key(headers, scope, receive, send)
        if not self._is_allowed(origin, headers.get("host", "")):
            error = ApiError(
                403,
                f"pages of {origin} may not call this server; see --allowed-origins",
                kind="permission_error",
                code="origin_not_allowed",
            )
            return await error.response()(scope, receive, send)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            wanted = headers.get("access-control-request-headers", "")
            return await _preflight(origin, wanted)(scope, receive, send)

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(
                    {
                        "access-control-allow-origin": origin,
                        "access-control-expose-headers": "*",
                        "vary": "origin",
                    }
                )
            await send(message)

        await self._with_key(headers, scope, receive, send_with_origin)

    def _is_allowed(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            return parts.netloc.lower() == host.lower() and _is_this_server(parts.hostname or "")
        except ValueError:
            return False

    async def _with_key(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        scope[OPERATOR], scope[HAS_OPERATOR_KEY] = not self._keys, False
        if self._keys and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = _digest(key.strip())
            # All keys are compared, so that the time does not reveal which one matches.
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if kind.lower() != "bearer" or not any(matches):
                error = ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                return await error.response()(scope, receive, send)
            scope[OPERATOR] = scope[HAS_OPERATOR_KEY] = given in self._operators
            scope[TENANT] = given.hex()[:_NAME_DIGITS]
            if len(self._keys) > 1:
                scope[CACHE_SALT] = given.hex()
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _is_this_server(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _preflight(origin: str, wanted: str) -> Response:
    """Return the answer to a browser's preflight: an allowed origin may send these headers."""
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": wanted,
            "access-control-max-age": "600",
            "vary": "origin",
        },
    )
