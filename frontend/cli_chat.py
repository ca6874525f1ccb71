"""`sidestep chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import msgspec

from sidestep.frontend.async_llm import AsyncLLM
from sidestep.frontend.cli_args import check_url_flags, engine_args, sampling_params
from sidestep.frontend.cli_generate import start_engine
from sidestep.frontend.event_loop import new_event_loop
from sidestep.ipc.errors import RemoteError, ValidationError
from sidestep.ipc.sampling_params import RequestOutputKind, SamplingParams

Ask = Callable[[list[dict[str, str]]], AsyncGenerator[str, None]]
"""Gives the answer to a conversation, piece by piece."""
HELP = "Type a message. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def run_chat(parsed: argparse.Namespace) -> int:
    """The command."""
    check_url_flags(parsed)
    if parsed.url is not None:
        from sidestep.frontend.cli_remote import run_remote_chat

        return run_remote_chat(parsed)
    params = msgspec.structs.replace(sampling_params(parsed, max_tokens=256), output_kind=RequestOutputKind.DELTA)
    arguments = engine_args(parsed)
    llm = start_engine(arguments)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            converse(partial(_ask, llm, params), parsed.system, runner)
    finally:
        llm.shutdown()
    return 0


async def _ask(llm: AsyncLLM, params: SamplingParams, messages: list[dict[str, str]]) -> AsyncGenerator[str, None]:
    async with aclosing(llm.generate(messages, params)) as outputs:
        async for output in outputs:
            yield output.outputs[0].text


def converse(ask: Ask, system: str | None, runner: asyncio.Runner) -> None:
    """Reads messages and streams answers until the user leaves.

    Reading a line and streaming an answer are each a run of the event loop, so that each takes Ctrl-C in its own way:
    the first leaves the chat, the second stops the answer.
    """
    lines = LineReader(sys.stdin.fileno())
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    print(HELP, file=sys.stderr)
    while (text := runner.run(lines.ask("> "))) is not None and text != "/exit":
        if text == "/reset":
            messages = list(beginning)
        elif text.startswith("/"):
            print(HELP, file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = stream_answer(ask, messages, runner)
            except (ValidationError, RemoteError) as error:  # too long by now, most likely: the user can /reset
                messages.pop()
                print(f"sidestep: {error}", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": answer})


class LineReader:
    """Lines of a terminal, pipe or file, read by the event loop. `input` would need a thread that Ctrl-C cannot end, or
    the main thread, where a Ctrl-C that comes just before it waits is lost."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""

    async def ask(self, prompt: str) -> str | None:
        """The next line, stripped; None at the end of the input."""
        print(prompt, end="", flush=True)
        while b"\n" not in self._unread:
            await self._until_readable()
            data = os.read(self._fd, 1 << 16)
            if not data:  # the last line may lack its end
                line, self._unread = self._unread, b""
                return line.decode(errors="replace").strip() or None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").strip()

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._fd, readable.set)
        except PermissionError:
            return  # a file: reading it never waits
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._fd)


def stream_answer(ask: Ask, messages: list[dict[str, str]], runner: asyncio.Runner) -> str:
    """Prints an answer as it comes and returns it. Ctrl-C ends it early: what has come counts."""
    answer = ""

    async def stream() -> None:
        nonlocal answer
        async with aclosing(ask(messages)) as pieces:
            async for piece in pieces:
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()

    try:
        runner.run(stream())  # Ctrl-C cancels it, and comes out here when it has ended
    except KeyboardInterrupt:
        pass
    finally:
        print()
    return answer
