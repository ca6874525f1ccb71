"""`sidestep serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sidestep.frontend.cli_args import engine_args, option_values
from sidestep.frontend.cli_generate import start_engine
from sidestep.frontend.event_loop import new_event_loop
from sidestep.frontend.server.options import ServerArgs, read_api_keys
from sidestep.ipc.config import EngineArgs, api_keys_of_environment
from sidestep.ipc.errors import SidestepError

if TYPE_CHECKING:
    from sidestep.frontend.server.tracing import Tracing


def run_serve(parsed: argparse.Namespace, version: str) -> int:
    """The command. The exit status is not 0 after the engine's death."""
    with needs_extra("server"):
        from sidestep.frontend.server.public_prefixes import PublicPrefixes, read_public_prefixes
        from sidestep.frontend.server.run import bind, serve
        from sidestep.frontend.server.service import Service
    args = ServerArgs(**option_values(parsed, ServerArgs))
    keys = read_api_keys(args.api_key_file, api_keys_of_environment())
    arguments = share_queue(engine_args(parsed), args.api_server_count)
    entries = read_public_prefixes(args.public_prefixes, keys)
    tracing = make_tracing(args.otlp_traces_endpoint, version)
    with bind(args) as listener:
        llm = start_engine(arguments)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                service = Service(llm, args, args.model_names(arguments.model), tracing,
                                  PublicPrefixes.of(entries, llm.get_tokenizer()))
                dead = runner.run(serve(service, keys, version, listener))
        finally:
            llm.shutdown()
            if tracing is not None:
                tracing.close()
    if dead is not None:
        print(f"sidestep: the engine has died: {dead}", file=sys.stderr)
        return 1
    return 0


def share_queue(arguments: EngineArgs, count: int) -> EngineArgs:
    """The same with the queue's limits divided among `count` API processes, each of which counts its own requests."""
    def share(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // count)

    return arguments.replace(max_num_queued_reqs=share(arguments.max_num_queued_reqs),
                             max_num_queued_tokens=share(arguments.max_num_queued_tokens))


def make_tracing(endpoint: str | None, version: str) -> Tracing | None:
    """What makes spans, where they are wanted."""
    if endpoint is None:
        return None
    with needs_extra("otel"):
        from sidestep.frontend.server.tracing import Tracing
    return Tracing.to_endpoint(endpoint, version)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around the import of what needs an extra's libraries: one line says how to get those that are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "a library").partition(".")[0]
        raise SidestepError(f"{library} is missing; install it: pip install 'sidestep[{extra}]'") from None
