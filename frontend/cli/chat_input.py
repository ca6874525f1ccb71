"""The reader of the messages of `sidestep chat`: from a terminal, or from a pipe or file.

prompt_toolkit reads the terminal, with line editing, history, and pasted text as one message. Only
the terminal's reader imports it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sidestep.ipc.config import colours_of_environment, state_folder_of_environment

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_HISTORY = "chat_history"


class Interrupted(Exception):
    """The error that the user pressed Ctrl-C at an empty prompt."""


class Messages(Protocol):
    """The interface of a source of messages, one after the other."""

    async def ask(self, prompt: str) -> str | None:
        """Return the next message, stripped; None at the end. Raises Interrupted."""


def open_messages() -> Messages:
    """Return the reader for this process's standard input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Terminal(state_folder_of_environment())
    return Lines(sys.stdin.fileno())


class Terminal:
    """The reader of a terminal.

    Enter sends the message; Alt-Enter, and Enter after a backslash, begin a new line.
    """

    def __init__(self, state_folder: Path | None) -> None:
        """Open the terminal.

        state_folder: folder of the file with the history of messages; None keeps the history for
        this process only.
        """
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth
        from prompt_toolkit.styles import Style

        self._session: PromptSession[str] = PromptSession(
            history=_open_history(state_folder),
            key_bindings=_key_bindings(),
            multiline=True,
            prompt_continuation="  ",
            style=Style.from_dict({"prompt": "bold ansicyan"}),
            color_depth=None if colours_of_environment() else ColorDepth.DEPTH_1_BIT,
        )

    async def ask(self, prompt: str) -> str | None:
        """Return the next message, stripped; None at Ctrl-D. Raises Interrupted."""
        try:
            return (await self._session.prompt_async([("class:prompt", prompt)])).strip()
        except EOFError:
            return None


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=Interrupted())

    return bindings


def _open_history(folder: Path | None) -> History:
    """Return the history in a file that only its owner can read.

    If such a file is not possible, return a history in memory.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if folder is None:
        return InMemoryHistory()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _HISTORY
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class Lines:
    """The reader of lines from a pipe or file, on the event loop.

    The function `input` would need a thread, which Ctrl-C cannot end, or the main thread. There, a
    Ctrl-C that comes just before the wait is lost.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""

    async def ask(self, prompt: str) -> str | None:
        """Return the next line, stripped; None at the end of the input."""
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
