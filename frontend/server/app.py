"""The ASGI application: its routes, and the layers that each request passes before a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestep.frontend.options.serve_options import Keys
from sidestep.frontend.server.openai.chat import ChatRoute
from sidestep.frontend.server.openai.completions import CompletionRoute
from sidestep.frontend.server.openai.tokens import DetokenizeRoute, TokenizeRoute
from sidestep.frontend.server.openapi import OpenApiRoute
from sidestep.frontend.server.operation.control import ControlRoutes
from sidestep.frontend.server.operation.flight import FlightRoute
from sidestep.frontend.server.operation.status import StatusRoutes
from sidestep.frontend.server.pooling.embeddings import (
    ClassifyRoute,
    EmbeddingRoute,
    PoolingRoute,
)
from sidestep.frontend.server.pooling.scoring import RerankRoute, ScoreRoute
from sidestep.frontend.server.responses.route import ResponsesRoute
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.body import read_body
from sidestep.frontend.server.transport.connection import RAW_SEND
from sidestep.frontend.server.transport.errors import ApiError, ClientGoneError, as_api_error
from sidestep.frontend.server.transport.guard import Guard
from sidestep.frontend.server.transport.page import page_routes
from sidestep.frontend.server.transport.request_log import RequestLog

Get = Callable[[Request], Awaitable[Response]]
Post = Callable[[Request, bytes], Awaitable[Response]]
_ROUTE = "sidestep.route"
"""Key of a request's scope: the pattern of its route. It is the label of the metrics, because paths
that clients make up must not become labels."""


def make_app(service: Service, keys: Keys, version: str) -> ASGIApp:
    """Return the ASGI application with all routes.

    keys: each request must bring one of them, if there are any. version: the server's version.
    """
    status = StatusRoutes(service, version)
    control = ControlRoutes(service)
    gets: dict[str, Get] = {
        "/health": status.health,
        "/ready": status.ready,
        "/version": status.version,
        "/metrics": status.metrics,
        "/v1/models": status.models,
        "/v1/models/{model:path}": status.model,
        "/v1/load": status.load,
        "/v1/flight": FlightRoute(service),
        "/memory_use": control.memory_use,
        "/is_sleeping": control.is_sleeping,
        "/openapi.json": OpenApiRoute(version),
        **page_routes(),
    }
    posts: dict[str, Post] = {
        "/tokenize": TokenizeRoute(service),
        "/detokenize": DetokenizeRoute(service),
    }
    generating: dict[str, Post] = {
        "/v1/chat/completions": ChatRoute(service),
        "/v1/completions": CompletionRoute(service),
        "/v1/responses": ResponsesRoute(service),
    }
    score, rerank = ScoreRoute(service), RerankRoute(service)
    pooling: dict[str, Post] = {
        "/v1/embeddings": EmbeddingRoute(service),
        "/pooling": PoolingRoute(service),
        "/classify": ClassifyRoute(service),
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
    }
    commands: dict[str, Get] = {
        "/start_profile": control.start_profile,
        "/stop_profile": control.stop_profile,
        "/sleep": control.sleep,
        "/wake_up": control.wake_up,
    }
    routes = [Route(path, _get(path, handler), methods=["GET"]) for path, handler in gets.items()]
    routes += [
        Route(path, _get(path, handler), methods=["POST"]) for path, handler in commands.items()
    ]
    routes += [
        Route(path, _post(path, service, handler, pools), methods=["POST"])
        for pools, table in ((None, posts), (False, generating), (True, pooling))
        for path, handler in table.items()
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        ClientGoneError: _gone,
        ApiError: _error,
        Exception: _error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _Counted(
        RequestLog(Guard(app, keys, service.args), access_log=service.args.access_log), service
    )


def make_metrics_app(service: Service, version: str) -> ASGIApp:
    """Return the ASGI application of --metrics-port: three routes, which need no key."""
    status = StatusRoutes(service, version)
    gets = {"/health": status.health, "/ready": status.ready, "/metrics": status.metrics}
    routes = [Route(path, _get(path, handler), methods=["GET"]) for path, handler in gets.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return _Counted(
        RequestLog(Guard(app, Keys(), service.args), access_log=service.args.access_log), service
    )


def _get(path: str, handler: Get) -> Get:
    async def endpoint(http: Request) -> Response:
        http.scope[_ROUTE] = path
        try:
            return await handler(http)
        except Exception as error:
            return as_api_error(error).response()

    return endpoint


def _post(path: str, service: Service, handler: Post, pools: bool | None) -> Get:
    """Return the route's endpoint. pools: see Service.check_task; None for either."""

    async def endpoint(http: Request) -> Response:
        http.scope[_ROUTE] = path
        try:
            body = await read_body(http, service.args.max_body_bytes, service.args.read_timeout)
        except ClientGoneError:
            raise
        except Exception as error:
            return as_api_error(error).response()
        size = len(body)
        try:
            service.check_admission()
            if pools is not None:
                service.check_task(pools=pools)
            return await handler(http, body)
        except ClientGoneError:
            raise
        except Exception as error:
            return as_api_error(error).response()
        finally:
            del body
            service.large.leave_no_memory(size)

    return endpoint


async def _error(http: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _gone(http: Request, error: Exception) -> Response:
    return Response(status_code=499)  # no client reads it, but the count of answers includes it


async def _http_error(http: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method, and name it in the message."""
    wrong = cast(HTTPException, error)
    text = {
        404: f"there is no {http.url.path} here{_why_not(http.url.path)}",
        405: f"{http.url.path} does not take {http.method}",
    }
    return ApiError(
        wrong.status_code, text.get(wrong.status_code, wrong.detail), headers=wrong.headers
    ).response()


_NOT_SERVED = {
    "/v1/files": "`sidestep run-batch` answers files of requests",
    "/v1/batches": "`sidestep run-batch` answers files of requests",
    "/v1/responses/": "answers are not stored",
    "/v1/chat/completions/": "answers are not stored",
    "/v1/audio": "this server reads and writes text alone",
    "/v1/images": "this server reads and writes text alone",
    "/v1/moderations": "this server generates text and judges none",
}
"""Beginning of a path of OpenAI's API -> the reason why this server refuses it."""


def _why_not(path: str) -> str:
    return next((f": {why}" for begin, why in _NOT_SERVED.items() if path.startswith(begin)), "")


class _Counted:
    """ASGI layer that counts the answers by route and status."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._responses = service.metrics.responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count its answer."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[scope.get(_ROUTE, "other"), str(message["status"])] += 1
            await send(message)

        scope[RAW_SEND] = send
        if scope["type"] == "http":
            await self._app(scope, receive, counting)
