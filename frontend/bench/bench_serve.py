"""`sidestep bench serve`, which sends a stream of requests as users send them.

It reports what the requests' receivers and the machine measured.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.progress import progress_bar
from sidestep.frontend.bench.bench import show
from sidestep.frontend.bench.load import (
    Lengths,
    PlannedRequest,
    arrivals,
    random_requests,
    read_requests,
)
from sidestep.frontend.bench.load_report import GOALS, Report, make_report
from sidestep.frontend.bench.load_send import EngineTarget, Target, send_all, usage
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.cli.serve import needs_extra
from sidestep.frontend.options.engine_args import EngineArgs, engine_options
from sidestep.frontend.options.option_parser import is_of_environment
from sidestep.ipc.common.errors import RequestError, ValidationError
from sidestep.ipc.common.logs import tell

if TYPE_CHECKING:
    from sidestep.frontend.bench.http_stream import HttpServer

DEFAULT_LENGTHS = {"input_len": "64:512", "output_len": "32:128"}
MOST_RETRIES = 3
"""Default number of times that a request is sent again to a server that has no room."""
ANY_VOCABULARY = 1000
"""Token ids below this are in the vocabulary of every model that users serve."""


def run_bench_serve(parsed: argparse.Namespace) -> int:
    """Run `sidestep bench serve` and return its exit status."""
    check(parsed)
    goals = parse_goals(parsed.goodput)
    if parsed.url is None:
        work = serve(start_engine(EngineArgs.from_cli_args(parsed)), parsed, goals)
    else:
        work = serve_at(server_at(parsed.url, parsed.api_key), parsed, goals)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        show(runner.run(work), parsed.json)
    return 0


def server_at(url: str, api_key: str | None) -> HttpServer:
    """Return the server at a URL.

    Raises ValidationError, and SidestepError without the server's libraries.
    """
    with needs_extra("server"):
        from sidestep.frontend.bench.http_stream import HttpServer
        from sidestep.frontend.bench.load_http import HttpTarget  # noqa: F401
    return HttpServer(url, api_key)


def check(parsed: argparse.Namespace) -> None:
    """Raise ValidationError for options that cannot be run, before an engine is started."""
    if parsed.num_prompts < 1:
        raise ValidationError("num_prompts", "must be at least 1")
    if not parsed.request_rate > 0:
        raise ValidationError("request_rate", f"must be above 0, not {parsed.request_rate}")
    if parsed.max_concurrency is not None and parsed.max_concurrency < 1:
        raise ValidationError("max_concurrency", "must be at least 1")
    if parsed.vocab_size is not None and parsed.vocab_size < 1:
        raise ValidationError("vocab_size", "must be at least 1")
    if parsed.max_retries is not None and parsed.max_retries < 0:
        raise ValidationError("max_retries", "must not be negative")
    for name in ("vocab_size", *DEFAULT_LENGTHS):
        if getattr(parsed, name) is not None and parsed.dataset is not None:
            raise ValidationError(name, "is for random prompts, and dataset gives others")
    if parsed.url is None:
        for name in ("api_key", "served_model", "vocab_size", "max_retries"):
            if getattr(parsed, name) is not None and not is_of_environment(parsed, name):
                raise ValidationError(name, "is for a server; give its url")
        return
    for name in engine_options(parsed):
        if not is_of_environment(parsed, name):
            raise ValidationError(
                name, "is for an engine in this process, and with url there is none"
            )


def parse_goals(words: Iterable[str]) -> dict[str, float]:
    """Return the milliseconds of words like ttft:200, by name."""
    goals = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ValidationError("goodput", f"{word!r} is not NAME:MILLISECONDS") from None
        if name not in GOALS:
            raise ValidationError("goodput", f"unknown name {name!r}; there are {', '.join(GOALS)}")
    return goals


def plan(
    parsed: argparse.Namespace, vocab_size: int, max_model_len: int | None
) -> list[PlannedRequest]:
    """Return all requests of the load.

    A model of length `max_model_len`, if it is known, can take each of them.
    """
    requests: list[tuple[str | list[int], int]] = []
    if parsed.dataset is not None:
        requests += read_requests(parsed.dataset, parsed.num_prompts)
    else:
        inputs, outputs = (
            Lengths.parse(getattr(parsed, name) or default, name)
            for name, default in DEFAULT_LENGTHS.items()
        )
        if max_model_len is not None and inputs.high + outputs.high > max_model_len:
            raise ValidationError(
                "output_len",
                f"{outputs.high} and input_len ({inputs.high}) together are more than "
                f"max_model_len ({max_model_len})",
            )
        requests += random_requests(
            parsed.num_prompts, inputs, outputs, vocab_size, parsed.load_seed
        )
    times = islice(
        arrivals(parsed.request_rate, parsed.arrival == "poisson", parsed.load_seed), len(requests)
    )
    return [
        PlannedRequest(prompt, length, at)
        for (prompt, length), at in zip(requests, times, strict=True)
    ]


async def serve(llm: AsyncLLM, parsed: argparse.Namespace, goals: dict[str, float]) -> Report:
    """Run the load on an engine in this process."""
    async with llm:
        load = plan(parsed, llm.get_tokenizer().vocab_size, llm.max_model_len)
        target = EngineTarget(llm, parsed.temperature, ignore_eos=parsed.ignore_eos)
        return {"device": llm.device, **await measure(target, load, parsed.max_concurrency, goals)}


async def serve_at(
    server: HttpServer, parsed: argparse.Namespace, goals: dict[str, float]
) -> Report:
    """Run the load on a server.

    A server that does not answer results in a report of failures.
    """
    from sidestep.frontend.bench.load_http import HttpTarget, models

    known = []
    try:
        known = await models(server)
    except RequestError as error:
        tell(f"{server.url} does not say which models it has: {error}", logging.WARNING)
    name = parsed.served_model or (known[0].id if known else None)
    limits = [model.max_model_len for model in known if model.id == name]
    load = plan(parsed, parsed.vocab_size or ANY_VOCABULARY, limits[0] if limits else None)
    retries = MOST_RETRIES if parsed.max_retries is None else parsed.max_retries
    target = HttpTarget(
        server, name, parsed.temperature, ignore_eos=parsed.ignore_eos, max_retries=retries
    )
    return {
        "url": server.url,
        **({} if name is None else {"model": name}),
        **await measure(target, load, parsed.max_concurrency, goals),
    }


async def measure(
    target: Target, load: list[PlannedRequest], max_concurrency: int | None, goals: dict[str, float]
) -> Report:
    """Return the report of a load, after two requests that are not counted."""
    await send_all(target, [PlannedRequest("for x in range(", 8, 0.0)] * 2, time.monotonic(), None)
    before, begin = await target.figures(), time.monotonic()
    with progress_bar(len(load), "request") as bar:
        report = make_report(
            await send_all(target, load, begin, max_concurrency, bar.update), begin, goals
        )
    return report | usage(await target.figures(), before)
