"""`sidestep serve`, which serves the OpenAI API over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.flags import server_args
from sidestep.frontend.options.serve_options import read_keys
from sidestep.ipc.common.errors import SidestepError
from sidestep.ipc.common.logs import own_process, tell

if TYPE_CHECKING:
    from sidestep.frontend.server.observe.tracing import Tracing


MOST_QUEUED = 4096
"""Default limit of requests that wait to be scheduled.

Requests beyond it would wait for minutes; a load balancer can send them to another server.
"""
_OPEN = """\
*** WARNING: this server listens beyond this machine and has no keys: whoever reaches it can use \
it and see
*** everyone's figures. Give keys by --api-key-file or SIDESTEP_API_KEYS, or listen at 127.0.0.1 \
(--host)."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_serve(parsed: argparse.Namespace, version: str) -> int:
    """Run `sidestep serve` and return its exit status, which is not 0 after the engine's death."""
    with needs_extra("server"):
        from sidestep.frontend.server.processes.listening import (
            bind,
            bind_metrics,
            check_certificates,
        )
        from sidestep.frontend.server.service.public_prefixes import (
            PublicPrefixes,
            read_public_prefixes,
        )
        from sidestep.frontend.server.transport.hosts import is_loopback
        from sidestep.frontend.server.transport.http_protocol import raise_file_limit
    own_process()
    args = server_args(parsed)
    keys = read_keys(args)
    arguments = share_queue(
        with_queue_limit(EngineArgs.from_cli_args(parsed)), args.api_server_count
    )
    check_certificates(args)
    entries = read_public_prefixes(args.public_prefixes, keys.all)
    raise_file_limit()
    with bind(args) as listener, bind_metrics(args) as metrics, ends_by_sigterm():
        if not (keys.all or args.ssl_ca_certs or is_loopback(listener.getsockname()[0])):
            tell(_OPEN, logging.WARNING)
        tracing = make_tracing(args.otlp_traces_endpoint, version)
        llm = start_engine(arguments, import_server)
        try:
            from sidestep.frontend.server.processes.run import serve
            from sidestep.frontend.server.service.service import Service

            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                service = Service(
                    llm,
                    args,
                    args.model_names(arguments.model),
                    tracing,
                    PublicPrefixes.of(entries, llm.get_tokenizer()),
                )
                dead = runner.run(serve(service, keys, version, listener, metrics))
                ignore_signals()  # the server is ending, in a bounded time
        finally:
            ignore_signals()
            llm.shutdown()
            if tracing is not None:
                tracing.close()
    if dead is not None:
        tell(f"sidestep: the engine has died: {dead}", logging.ERROR)
        return 1
    return 0


def import_server() -> None:
    """Import all that answers requests, while the engine starts."""
    with needs_extra("server"):
        importlib.import_module("sidestep.frontend.server.processes.run")


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does inside this block.

    It does so also while the engine starts, so that no process or file is left behind. The server
    has handlers of its own while it serves.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore further signals, so that none interrupts the clean-up."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def with_queue_limit(arguments: EngineArgs) -> EngineArgs:
    """Return the options with the server's default limit of waiting requests, if they have none."""
    if arguments.max_num_queued_reqs is not None:
        return arguments
    return arguments.replace(max_num_queued_reqs=MOST_QUEUED)


def share_queue(arguments: EngineArgs, count: int) -> EngineArgs:
    """Return the options with the queue's limits divided among `count` API processes.

    Each process counts its own requests.
    """

    def share(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // count)

    return arguments.replace(
        max_num_queued_reqs=share(arguments.max_num_queued_reqs),
        max_num_queued_tokens=share(arguments.max_num_queued_tokens),
    )


def make_tracing(endpoint: str | None, version: str) -> Tracing | None:
    """Return the maker of spans; None without an endpoint."""
    if endpoint is None:
        return None
    with needs_extra("otel"):
        from sidestep.frontend.server.observe.tracing import Tracing
    return Tracing.to_endpoint(endpoint, version)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise SidestepError, in one line, if an import in this block lacks an extra's library.

    The line says how to install the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "a library").partition(".")[0]
        raise SidestepError(
            f"{library} is missing; install it: pip install 'sidestep[{extra}]'"
        ) from None
