"""Answer the requests of a batch file with the server's own routes, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import httpx2
import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.app import make_app
from sidestep.frontend.server.batch_file import BatchRequest, BatchResponse, BatchResult
from sidestep.frontend.server.service.service import Service, new_id
from sidestep.ipc.common.errors import EngineDeadError

_HEADERS = {"content-type": "application/json"}


async def answer_all(
    llm: AsyncLLM,
    args: ServerArgs,
    names: Sequence[str],
    requests: Sequence[BatchRequest],
    max_concurrency: int,
    take: Callable[[BatchResult], None],
) -> None:
    """Answer all requests, and pass each result to `take` as soon as it is there.

    max_concurrency: largest number of requests that run at the same time. Raises EngineDeadError:
    the requests that ran at that time have no result, so another run does them.
    """
    # The process that runs a batch owns the engine and opens no socket, so it needs no keys.
    transport = httpx2.ASGITransport(
        make_app(Service(llm, args, names), Keys(), ""), raise_app_exceptions=False
    )
    waiting = iter(requests)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://localhost", headers=_HEADERS
    ) as client:

        async def work() -> None:
            for request in waiting:
                take(await _answer(client, request))

        tasks = [asyncio.create_task(work()) for _ in range(min(max_concurrency, len(requests)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(client: httpx2.AsyncClient, request: BatchRequest) -> BatchResult:
    answer = await client.post(request.url, content=bytes(request.body))
    if answer.status_code == 503:
        raise EngineDeadError(answer.json()["error"]["message"])
    request_id = answer.headers.get("x-request-id") or new_id("req")
    return BatchResult(
        custom_id=request.custom_id,
        response=BatchResponse(answer.status_code, request_id, msgspec.Raw(answer.content)),
    )
