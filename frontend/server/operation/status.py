"""Routes for operators and routers of requests: health, readiness, models, load and metrics."""

from __future__ import annotations

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.api.engine_view import sum_stats
from sidestep.frontend.server.observe.exposition import Exposition
from sidestep.frontend.server.observe.figures import TenantCounts
from sidestep.frontend.server.schemas.protocol import Load, Model, ModelList, Status, Version
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import RETRY_AFTER, ApiError
from sidestep.frontend.server.transport.guard import OPERATOR, TENANT
from sidestep.ipc.common.errors import EngineDeadError, EngineStalledError


class StatusRoutes:
    """Handlers of these routes, one method for each route."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version
        self._exposition = Exposition(
            service.names[0], with_vllm=service.args.metrics_compat == "vllm"
        )

    async def health(self, http: Request) -> Response:
        """Answer 200 while the engine makes progress: a busy loop answers and its steps come back.

        One replica of several is enough, and so is one that is being started again. The answer
        names the replicas that are dead or stalled, or that are being started again.
        """
        return _json(await self._health("ok"))

    async def ready(self, http: Request) -> Response:
        """Answer 200 while the engine makes progress and the server does not end."""
        if self._service.is_ending:
            raise ApiError(
                503,
                "the server is shutting down",
                kind="server_error",
                code="draining",
                headers=RETRY_AFTER,
            )
        health = await self._health("ready")
        if len(health.restarting_replicas) + len(health.dead_replicas) == len(
            self._service.llm.replicas
        ):
            raise ApiError(
                503,
                "the engine is being started again",
                kind="server_error",
                code="restarting",
                headers=RETRY_AFTER,
            )
        if await self._service.llm.is_sleeping():
            raise ApiError(
                503,
                "the engine sleeps",
                kind="server_error",
                code="sleeping",
                headers=RETRY_AFTER,
            )
        return _json(health)

    async def _health(self, good: str) -> Status:
        await self._service.llm.check_health()  # its errors become answers with status 503
        replicas = self._service.llm.replicas
        dead = {str(status.number): status.dead for status in replicas if status.dead is not None}
        stalled = {
            str(status.number): status.stalled for status in replicas if status.stalled is not None
        }
        restarting = {
            str(status.number): status.restarting
            for status in replicas
            if status.restarting is not None
        }
        word = "degraded" if dead or stalled else "restarting" if restarting else good
        hosts = {host.name: list(host.replicas) for host in self._service.llm.hosts}
        return Status(word, dead, stalled, restarting, hosts)

    async def version(self, http: Request) -> Response:
        """Answer with the server's version."""
        return _json(Version(self._version))

    async def models(self, http: Request) -> Response:
        """Answer with the model, once for each of its names."""
        return _json(ModelList(data=[self._model(name) for name in self._service.names]))

    async def model(self, http: Request) -> Response:
        """Answer with the model under one of its names."""
        return _json(self._model(self._service.check_model(http.path_params["model"])))

    async def load(self, http: Request) -> Response:
        """Answer with the load of the engine."""
        stats, figures = (
            sum_stats((await self._service.stats()).values()),
            await self._service.figures(),
        )
        return _json(
            Load(
                int(stats["num_running"]),
                int(stats["num_waiting"]),
                figures.num_running,
                stats["kv_cache_usage"],
            )
        )

    async def metrics(self, http: Request) -> Response:
        """Answer with the metrics for Prometheus."""
        service = self._service
        figures = await service.figures()
        try:
            stats = await service.stats()
        except (EngineStalledError, EngineDeadError):
            stats = {}  # the server's own figures are served all the same
        if not http.scope[OPERATOR]:
            own = http.scope[TENANT]
            figures = msgspec.structs.replace(
                figures, tenants={own: figures.tenants.get(own, TenantCounts())}
            )
        text = self._exposition.text(stats, service.llm.replicas, figures, service.llm.caches)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _model(self, name: str) -> Model:
        return Model(
            id=name,
            created=self._service.started,
            root=self._service.names[0],
            max_model_len=self._service.llm.max_model_len,
        )


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
