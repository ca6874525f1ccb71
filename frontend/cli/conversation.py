"""A conversation in the terminal, with messages, commands and streamed answers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from sidestep.frontend.cli.chat_input import Interrupted, open_messages
from sidestep.frontend.cli.terminal import StatusLine, tell
from sidestep.ipc.common.errors import CannotChatError, RemoteError, ValidationError

Ask = Callable[[list[dict[str, str]]], AsyncGenerator[str, None]]
"""A function that returns the answer to a conversation, piece by piece."""
HELP = """\
Type a message and press Enter. Alt-Enter, or a backslash at the line's end, begins a new line.
  /system TEXT  set the system message; /system alone shows it, /system - removes it
  /clear        forget the conversation (/reset does the same)
  /help         show this
  /exit         leave; so does Ctrl-D, or Ctrl-C at an empty prompt
Ctrl-C stops an answer."""
HINT = "Type a message. /help tells what else there is; Ctrl-D leaves."
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A command such as /clear.

A path is no command: it has another slash.
"""


def converse(ask: Ask, system: str | None, runner: asyncio.Runner, status: StatusLine) -> None:
    """Read messages and stream answers until the user leaves.

    Raises KeyboardInterrupt for Ctrl-C at the prompt, and CannotChatError for a server's model that
    answers no message.

    Reading a message and streaming an answer are two runs of the event loop, so that each handles
    Ctrl-C in its own way. At the prompt, Ctrl-C leaves the chat; during an answer, it stops the
    answer.
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
    except CannotChatError:
        raise
    except (ValidationError, RemoteError) as error:  # most likely too long: the user can /clear
        tell(f"sidestep: {error}", "bad")
    else:
        conversation.add(text, answer)


def stream_answer(
    ask: Callable[[], AsyncGenerator[str, None]], runner: asyncio.Runner, status: StatusLine
) -> str:
    """Print an answer as it comes, and return it.

    Ctrl-C stops the answer; the part that has come is kept.
    """
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
        runner.run(
            stream()
        )  # Ctrl-C cancels it; KeyboardInterrupt is raised here when it has ended
    except KeyboardInterrupt:
        pass
    finally:
        status.clear()
        print()
    return answer
