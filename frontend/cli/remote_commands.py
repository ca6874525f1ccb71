"""`sidestep chat` and `sidestep generate` with --url, for a model that runs elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing

from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.cli.conversation import converse
from sidestep.frontend.cli.printer import Printer
from sidestep.frontend.cli.remote_model import RemoteModel
from sidestep.frontend.cli.terminal import StatusLine
from sidestep.frontend.options.flags import sampling_values
from sidestep.ipc.common.logs import tell


def run_remote_chat(parsed: argparse.Namespace) -> int:
    """Run `sidestep chat` with --url and return its exit status."""
    model = _remote_model(parsed, max_tokens=256)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            _tell(runner.run(model.connect()), parsed.url)
            status = StatusLine()
            if sys.stderr.isatty():
                model.on_queue = lambda queue: status.show(queue.text)
            converse(model.chat, parsed.system, runner, status)
        finally:
            runner.run(model.close())
    return 0


def run_remote_generate(parsed: argparse.Namespace, prompts: Sequence[str]) -> int:
    """Run `sidestep generate` with --url and return its exit status."""
    model = _remote_model(parsed, max_tokens=64)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            _tell(runner.run(model.connect()), parsed.url)
            runner.run(_generate(model, prompts))
        finally:
            runner.run(model.close())
    return 0


def _remote_model(parsed: argparse.Namespace, *, max_tokens: int) -> RemoteModel:
    """Return the model that the command names.

    Only the sampling options that were given are sent: not every server knows them all.
    """
    name = getattr(parsed, "model_argument", None) or getattr(parsed, "model", None)
    return RemoteModel(
        parsed.url, parsed.api_key, name, {"max_tokens": max_tokens, **sampling_values(parsed)}
    )


def _tell(model: str, url: str) -> None:
    tell(f"{model} at {url}")


async def _generate(model: RemoteModel, prompts: Sequence[str]) -> None:
    """Complete the prompts as with an engine in this process.

    Tokens are not counted, as a piece of a stream may hold several.
    """
    printer, start, firsts = Printer(prompts), time.perf_counter(), list[float]()

    async def stream(index: int, prompt: str) -> None:
        is_first = True
        async with aclosing(model.complete(prompt)) as pieces:
            async for piece in pieces:
                if is_first:
                    firsts.append(time.perf_counter() - start)
                    is_first = False
                printer.add(index, piece, False)
        printer.add(index, "", True)

    await asyncio.gather(*(stream(i, prompt) for i, prompt in enumerate(prompts)))
    mean_ms = sum(firsts) / max(1, len(firsts)) * 1e3
    tell(f"{len(prompts)} requests in {time.perf_counter() - start:.2f} s: TTFT {mean_ms:.0f} ms")
