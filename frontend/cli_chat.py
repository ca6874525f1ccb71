"""`sidestep chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading

import msgspec

from sidestep.frontend.async_llm import AsyncLLM
from sidestep.frontend.cli_args import engine_args, sampling_params
from sidestep.frontend.cli_generate import start_engine
from sidestep.ipc.errors import ValidationError
from sidestep.ipc.sampling_params import RequestOutputKind, SamplingParams

HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run_chat(parsed: argparse.Namespace) -> int:
    """The command."""
    params = msgspec.structs.replace(sampling_params(parsed, max_tokens=256), output_kind=RequestOutputKind.DELTA)
    arguments = engine_args(parsed)
    llm = start_engine(arguments)
    try:
        asyncio.run(converse(llm, params, parsed.system))
    finally:
        llm.shutdown()
    return 0


async def converse(llm: AsyncLLM, params: SamplingParams, system: str | None) -> None:
    """Reads messages and streams answers until the user leaves."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    print(HELP, file=sys.stderr)
    while (text := await read_line("> ")) is not None and text != "/exit":
        if text == "/reset":
            messages = list(beginning)
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = await stream_answer(llm, messages, params)
            except ValidationError as error:  # too long by now, most likely: the user can /reset
                messages.pop()
                print(f"sidestep: {error}", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": answer})


async def read_line(prompt: str) -> str | None:
    """A line from the terminal, stripped; None at the end of the input. Read in a thread, so that the engine's messages
    keep flowing; a daemon, so that Ctrl-C at the prompt leaves without waiting for the line."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str | None] = loop.create_future()

    def give(text: str | None) -> None:
        if not line.done():
            line.set_result(text)

    def read() -> None:
        try:
            text: str | None = input(prompt).strip()
        except EOFError:
            text = None
        if not loop.is_closed():
            loop.call_soon_threadsafe(give, text)

    threading.Thread(target=read, name="terminal", daemon=True).start()
    return await line


async def stream_answer(llm: AsyncLLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints an answer as it comes and returns it. Ctrl-C ends it early: what has come counts."""
    answer = ""

    async def stream() -> None:
        nonlocal answer
        async for output in llm.generate(messages, params):
            answer += output.outputs[0].text
            sys.stdout.write(output.outputs[0].text)
            sys.stdout.flush()

    task = asyncio.create_task(stream())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        pass
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        print()
    return answer
