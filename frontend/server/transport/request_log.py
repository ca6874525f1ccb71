"""Give each request an id, return it with the answer, and write the access log.

The id is the client's if it sends one, else the id of the completion, else a new one.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.common.logs import FIELDS

HEADER = "x-request-id"
"""Header with the id, in requests and answers."""
LOGGED = "sidestep.logged"
"""Key of a request's scope: further fields of its line in the access log."""
_ID = re.compile(r"[A-Za-z0-9._:;=/+@-]{1,128}")
_CLIENT_GONE = 499
logger = logging.getLogger("sidestep.access")


class RequestLog:
    """ASGI layer that gives ids and writes the log.

    It wraps the guard, so refused requests have ids too.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, give its answer an id, and log it."""
        given = Headers(scope=scope).get(HEADER)
        is_good = given is None or _ID.fullmatch(given) is not None
        request_id = given if given is not None and is_good else uuid.uuid4().hex
        scope[LOGGED] = {}
        begin, status = time.monotonic(), _CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                if given is None:
                    request_id = headers.get(HEADER, request_id)
                headers[HEADER] = request_id
            await send(message)

        try:
            if is_good:
                await self._app(scope, receive, send_with_id)
            else:
                error = refused(HEADER, "must be 1 to 128 letters, digits and . _ : ; = / + @ -")
                await error.response()(scope, receive, send_with_id)
        finally:
            if self._access_log:
                self._log(scope, status, request_id, time.monotonic() - begin)

    def _log(self, scope: Scope, status: int, request_id: str, seconds: float) -> None:
        client = scope["client"][0] if scope.get("client") else "-"
        fields: dict[str, Any] = {
            "client": client,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
            "request_id": request_id,
            **scope[LOGGED],
        }
        more = "".join(f" {name}={value!r}" for name, value in scope[LOGGED].items())
        logger.info(
            "%s %s %s %d %.1f ms %s%s",
            client,
            scope["method"],
            ascii(scope["path"])[1:-1],
            status,
            seconds * 1e3,
            request_id,
            more,
            extra={FIELDS: fields},
        )
