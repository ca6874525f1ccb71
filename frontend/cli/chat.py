"""`sidestep chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.startup import load_tokenizer
from sidestep.frontend.cli.conversation import converse
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.cli.terminal import StatusLine
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.flags import check_url_flags, sampling_params
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams


def run_chat(parsed: argparse.Namespace) -> int:
    """Run `sidestep chat` and return its exit status."""
    check_url_flags(parsed)
    if parsed.url is not None:
        from sidestep.frontend.cli.remote_commands import run_remote_chat

        return run_remote_chat(parsed)
    sampling_params(parsed, max_tokens=256)  # raises before the engine starts if they are wrong
    arguments = EngineArgs.from_cli_args(parsed)
    _check_template(arguments)
    llm = start_engine(arguments)
    try:
        params = sampling_params(parsed, **{"max_tokens": 256, **llm.sampling_defaults})
        params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            converse(partial(_ask, llm, params), parsed.system, runner, StatusLine())
    finally:
        with _no_interrupts():
            llm.shutdown()
    return 0


def _check_template(arguments: EngineArgs) -> None:
    """Raise ValidationError, before the engine starts, for a model that cannot chat."""
    if load_tokenizer(arguments.create_engine_config()).chat_template is None:
        problem = f"{arguments.model} has no chat template, so it cannot chat"
        raise ValidationError("model", f"{problem}; `sidestep generate` completes text with it")


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while the chat ends.

    A second Ctrl-C could only break off the clean-up.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _ask(
    llm: AsyncLLM, params: SamplingParams, messages: list[dict[str, str]]
) -> AsyncGenerator[str, None]:
    async with aclosing(llm.generate(messages, params)) as outputs:
        async for output in outputs:
            yield output.outputs[0].text
