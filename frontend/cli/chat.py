"""`sidestep chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.startup import load_tokenizer
from sidestep.frontend.cli.chat_input import Interrupted, open_messages
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.cli.terminal import StatusLine, tell
from sidestep.frontend.options.flags import check_url_flags, engine_args, sampling_params
from sidestep.ipc.common.errors import RemoteError, ValidationError
from sidestep.ipc.config import EngineArgs
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

Ask = Callable[[list[dict[str, str]]], AsyncGenerator[str, None]]
"""Gives the answer to a conversation, piece by piece."""
HELP = """\
Type a message and press Enter. Alt-Enter, or a backslash at the line's end, begins a new line.
  /system TEXT  set the system message; /system alone shows it, /system - removes it
  /clear        forget the conversation (/reset does the same)
  /help         show this
  /exit         leave; so does Ctrl-D, or Ctrl-C at an empty prompt
Ctrl-C stops an answer."""
HINT = "Type a message. /help tells what else there is; Ctrl-D leaves."
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A command such as /clear. A path is not one: it has another slash."""


def run_chat(parsed: argparse.Namespace) -> int:
    """The command."""
    check_url_flags(parsed)
    if parsed.url is not None:
        from sidestep.frontend.cli.remote_commands import run_remote_chat

        return run_remote_chat(parsed)
    sampling_params(parsed, max_tokens=256)  # raises before the engine starts if they are wrong
    arguments = engine_args(parsed)
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
    """Ignore Ctrl-C during the moment that leaving takes. A second Ctrl-C could only break it
    off."""
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


def converse(ask: Ask, system: str | None, runner: asyncio.Runner, status: StatusLine) -> None:
    """Read messages and stream answers until the user leaves. Raises KeyboardInterrupt for Ctrl-C
    at the prompt.

    Reading a message and streaming an answer are two runs of the event loop, so that each handles
    Ctrl-C in its own way: at the prompt it leaves the chat, during an answer it stops the answer.
    """
    incoming, conversation = open_messages(), Conversation(system)
    tell(HINT)
    try:
        while (text := runner.run(incoming.ask("> "))) is not None:
            if (command := _COMMAND.fullmatch(text)) is not None:
                if not conversation.obey(command[1], (command[2] or "").strip()):
                    return
            elif text:
                _answer(conversation, text, ask, runner, status)
    except Interrupted:
        raise KeyboardInterrupt from None


class Conversation:
    """The messages and answers of a chat, and the system message before them."""

    def __init__(self, system: str | None) -> None:
        self._system = system or None
        self._said: list[dict[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the messages to send if the user says `text` next."""
        beginning = [_message("system", self._system)] if self._system is not None else []
        return [*beginning, *self._said, _message("user", text)]

    def add(self, text: str, answer: str) -> None:
        """Remember a message and its answer."""
        self._said += [_message("user", text), _message("assistant", answer)]

    def obey(self, command: str, rest: str) -> bool:
        """Carry out a command. Return False if the user leaves."""
        if command == "exit":
            return False
        if command in ("clear", "reset"):
            self._said.clear()
            tell("The conversation is forgotten.")
        elif command == "system":
            if rest:
                self._system = None if rest == "-" else rest
            has_one = self._system is not None
            tell(f"System message: {self._system}" if has_one else "There is no system message.")
        else:
            if command != "help":
                tell(f"There is no command /{command}.", "bad")
            tell(HELP)
        return True


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _answer(
    conversation: Conversation, text: str, ask: Ask, runner: asyncio.Runner, status: StatusLine
) -> None:
    try:
        answer = stream_answer(partial(ask, conversation.messages(text)), runner, status)
    except (ValidationError, RemoteError) as error:  # most likely too long: the user can /clear
        tell(f"sidestep: {error}", "bad")
    else:
        conversation.add(text, answer)


def stream_answer(
    ask: Callable[[], AsyncGenerator[str, None]], runner: asyncio.Runner, status: StatusLine
) -> str:
    """Print an answer as it comes, and return it. Ctrl-C stops the answer; the part that has come
    is kept."""
    answer = ""

    async def stream() -> None:
        nonlocal answer
        async with aclosing(ask()) as pieces:
            async for piece in pieces:
                status.clear()
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()

    try:
        runner.run(stream())  # Ctrl-C cancels it, and comes out here when it has ended
    except KeyboardInterrupt:
        pass
    finally:
        status.clear()
        print()
    return answer
