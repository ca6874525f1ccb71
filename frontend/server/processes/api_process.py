"""Process of a server that does not own the engine.

It joins the engine, and serves from a listening socket that it inherits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import TYPE_CHECKING

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.server.observe.figures import Figures
from sidestep.frontend.server.processes.api_line import Drain, Joined, Line, Serve, Word
from sidestep.frontend.server.processes.api_processes import ApiProcessArgs
from sidestep.frontend.server.processes.run import make_server, run
from sidestep.frontend.server.service.public_prefixes import PublicPrefixes
from sidestep.frontend.server.service.service import Service
from sidestep.ipc.common.errors import EngineDeadError, SidestepError
from sidestep.ipc.common.logs import tell
from sidestep.ipc.processes.process import decode_args

if TYPE_CHECKING:
    from sidestep.frontend.server.observe.tracing import Tracing

_GATHER_S = 5.0
"""Seconds to wait for the first process's answer with the figures of all processes."""


def main(raw: bytes) -> None:
    """Run the process, as its entry point. The exit status is 0 after a drain of all requests."""
    job = decode_args(raw, ApiProcessArgs)
    try:
        llm = AsyncLLM.join(job.invitation)
    except SidestepError as error:
        tell(f"sidestep: {error}", logging.ERROR)
        sys.exit(1)
    tracing, prefixes = _tracing(job), PublicPrefixes(job.public_prefixes)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            dead = runner.run(_serve(job, Service(llm, job.args, job.names, tracing, prefixes)))
    except SidestepError as error:
        tell(f"sidestep: {error}", logging.ERROR)
        sys.exit(1)
    finally:
        llm.shutdown()
        if tracing is not None:
            tracing.close()
    sys.exit(0 if dead is None else 1)


def _tracing(job: ApiProcessArgs) -> Tracing | None:
    if job.args.otlp_traces_endpoint is None:
        return None
    from sidestep.frontend.server.observe.tracing import Tracing

    return Tracing.to_endpoint(job.args.otlp_traces_endpoint, job.version)


async def _serve(job: ApiProcessArgs, service: Service) -> EngineDeadError | None:
    server = make_server(service, job.keys, job.version)
    may_serve = asyncio.Event()

    def on_word(word: Word) -> None:
        if isinstance(word, Serve):
            may_serve.set()
        elif isinstance(word, Drain):
            server.end()

    async def own() -> Figures:
        return service.own_figures()

    async def of_all() -> Figures:
        return await line.ask(_GATHER_S) or service.own_figures()

    line = Line(socket.socket(fileno=job.line), own, on_word)
    hearing = asyncio.create_task(line.run())
    service.gather = of_all
    try:
        await line.opened.wait()
        line.say(Joined())
        await may_serve.wait()
        with socket.socket(fileno=job.listener) as listener:
            return await run(server, listener, announce=False)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
