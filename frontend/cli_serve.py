"""`sidestep serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sidestep.frontend.cli_args import engine_args, option_values
from sidestep.frontend.cli_generate import start_engine
from sidestep.frontend.event_loop import new_event_loop
from sidestep.frontend.server.options import ServerArgs, read_api_keys
from sidestep.ipc.config import api_keys_of_environment
from sidestep.ipc.errors import SidestepError


def run_serve(parsed: argparse.Namespace, version: str) -> int:
    """The command. The exit status is not 0 after the engine's death."""
    with needs_server_extra():
        from sidestep.frontend.server.run import bind, serve
    args = ServerArgs(**option_values(parsed, ServerArgs))
    keys = read_api_keys(args.api_key_file, api_keys_of_environment())
    arguments = engine_args(parsed)
    with bind(args) as listener:
        llm = start_engine(arguments)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                dead = runner.run(serve(llm, args, args.model_names(arguments.model), keys, version, listener))
        finally:
            llm.shutdown()
    if dead is not None:
        print(f"sidestep: the engine has died: {dead}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def needs_server_extra() -> Iterator[None]:
    """Around the import of what needs the server's libraries: one line says how to get those that are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "a library").partition(".")[0]
        raise SidestepError(f"{library} is missing; install the server: pip install 'sidestep[server]'") from None
