"""Routes that change the engine: most are POST without a body, all for operators with a key.

The paths and parameters are vLLM's. A server without operators' keys refuses these routes to all,
since whoever reaches it could stop it from serving.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import ApiError, refused
from sidestep.frontend.server.transport.guard import HAS_OPERATOR_KEY


class Profile(msgspec.Struct):
    """Answer to /stop_profile."""

    files: list[str]
    """Paths of the files on the server's machine, one a worker."""


class Memory(msgspec.Struct):
    """Answer to /memory_use."""

    workers: list[dict[str, int]]
    """For each worker its replica and rank, and bytes by what they are used for."""


class Sleeping(msgspec.Struct):
    """Answer to /is_sleeping."""

    is_sleeping: bool


class ControlRoutes:
    """Handlers of these routes, one method for each route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def start_profile(self, http: Request) -> Response:
        """Begin to record what the workers do, in the folder of the option profiler_dir."""
        _check(http)
        await self._service.llm.start_profile()
        return _json({})

    async def stop_profile(self, http: Request) -> Response:
        """End the recording, and answer with the files that it was written to."""
        _check(http)
        return _json(Profile(await self._service.llm.stop_profile()))

    async def memory_use(self, http: Request) -> Response:
        """Answer with the bytes of memory that each worker uses."""
        _check(http)
        return _json(Memory(await self._service.llm.get_memory_use()))

    async def sleep(self, http: Request) -> Response:
        """Free memory when all requests have ended; the parameter `level` is 1 or 2."""
        _check(http, ("level",))
        levels = http.query_params.getlist("level") or ["1"]
        if levels not in (["1"], ["2"]):
            raise refused("level", f"must be 1 or 2, not {', '.join(levels)[:40]!r}")
        await self._service.llm.sleep(int(levels[0]))
        return _json({})

    async def wake_up(self, http: Request) -> Response:
        """End the sleep."""
        _check(http)
        await self._service.llm.wake_up()
        return _json({})

    async def is_sleeping(self, http: Request) -> Response:
        """Answer whether the engine sleeps."""
        _check(http)
        return _json(Sleeping(await self._service.llm.is_sleeping()))


def _check(http: Request, parameters: Collection[str] = ()) -> None:
    """Raise ApiError without an operator's key (403), and for an unknown parameter (400)."""
    if not http.scope[HAS_OPERATOR_KEY]:
        raise ApiError(
            403,
            f"{http.url.path} needs an operator's key; see --operator-key-file",
            kind="permission_error",
            code="operator_key_needed",
        )
    for name in http.query_params:
        if name not in parameters:
            raise refused(name, "is no parameter of this route", "unknown_field")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
