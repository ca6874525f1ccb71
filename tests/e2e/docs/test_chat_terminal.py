"""`sidestep chat` in a real terminal: typed and pasted text, Ctrl-C and Ctrl-D, colours."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import PYTHON_PATH

PROMPT = b"> "
LINE_HAS_ENDED = b"\x1b[?2004l"
"""Sequence that switches the terminal's paste mode off. After it, Ctrl-C is a signal."""


def enter_terminal() -> None:
    """Prepare the new process as a shell prepares a program.

    The parent may ignore signals; the program must not inherit that.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """A terminal with a chat in it."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self.process = process
        self.shown = b""

    def until(self, words: bytes) -> bytes:
        """Return the text shown since the last call, up to the given words."""
        while words not in self.shown:
            assert select.select([self._descriptor], [], [], 60)[0], self.shown
            part = os.read(self._descriptor, 4096)
            assert part, self.shown
            self.shown += part
        before, _, self.shown = self.shown.partition(words)
        return before

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def rest(self) -> bytes:
        """Return the text shown until the program has ended."""
        try:
            while data := os.read(self._descriptor, 4096):
                self.shown += data
        except OSError:  # a terminal that no process has open ends with this error
            pass
        return self.shown


@contextmanager
def chat(state: Path, *words: str, **environment: str) -> Iterator[Screen]:
    outside, inside = pty.openpty()
    # The terminal of this test answers no questions about its cursor.
    environment = {
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "XDG_STATE_HOME": str(state),
        "PYTHONPATH": PYTHON_PATH,
        **environment,
    }
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sidestep", "chat", "--temperature", "0", *words],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=enter_terminal,
        env=inherited | environment,
    )
    os.close(inside)
    try:
        yield Screen(outside, process)
    finally:
        process.kill()
        process.wait()
        os.close(outside)


def test_a_conversation_is_edited_remembered_and_ended_with_ctrl_d(tmp_path: Path) -> None:
    with chat(tmp_path, "--max-tokens", "40") as screen:
        screen.until(PROMPT)
        screen.type(b"Hallo\x1b[D\x1b[D\x1b[D\x7fe\r")  # three to the left, and another letter
        screen.until(b"Hello! Ask me about a module")
        screen.until(PROMPT)
        screen.type(b"\x04")
        assert screen.process.wait(20) == 0
        assert b"Traceback" not in screen.rest()
    assert (tmp_path / "sidestep" / "chat_history").read_text().endswith("+Hello\n")


def test_pasted_lines_are_one_message_and_two_ctrl_c_end_quietly(tmp_path: Path) -> None:
    with chat(
        tmp_path,
        "--device",
        "fake",
        "--fake-step-ms",
        "5",
        "--max-tokens",
        "2000",
        "--ignore-eos",
        NO_COLOR="1",
    ) as screen:
        told = screen.until(PROMPT)
        assert b"starting the engine" in told and b"\x1b[2m" not in told and b"\x1b[3" not in told
        screen.type(b"\x1b[200~one\ntwo\nthree\x1b[201~\r")
        screen.until(LINE_HAS_ENDED)
        screen.until(b" ")  # the answer has begun
        screen.type(b"\x03")
        screen.until(PROMPT)
        screen.type(b"\x03")
        assert screen.process.wait(20) == 130
        assert b"Traceback" not in screen.rest()
    history = (tmp_path / "sidestep" / "chat_history").read_text()
    assert history.endswith("+one\n+two\n+three\n") and history.count("# ") == 1


def test_a_terminal_has_colours(tmp_path: Path) -> None:
    with chat(tmp_path, "--device", "fake") as screen:
        screen.until(b"\x1b[2mType a message")
        assert b"\x1b[0;36;1m" in screen.until(PROMPT)
        screen.type(b"/what\r")
        screen.until(b"\x1b[31mThere is no command /what.\x1b[0m")
