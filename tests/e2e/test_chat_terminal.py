"""`sidestep chat` in a real terminal: answers stream, Ctrl-C at the prompt leaves at once, Ctrl-D leaves politely."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import pytest


def enter_terminal() -> None:
    """In the new process: as a shell starts a program, whatever this one was started by and ignores."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_until(terminal: int, words: bytes, seen: bytes = b"") -> bytes:
    """What the terminal shows, up to these words."""
    while words not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.parametrize(("key", "status"), [(b"\x04", 0), (b"\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_a_conversation_and_how_it_ends(key: bytes, status: int) -> None:
    terminal, inside = pty.openpty()
    chat = subprocess.Popen([sys.executable, "-m", "sidestep", "chat", "--temperature", "0", "--max-tokens", "40"],
                            stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
                            preexec_fn=enter_terminal)
    os.close(inside)
    read_until(terminal, b"> ")
    os.write(terminal, b"Hello!\n")
    shown = read_until(terminal, b"> ", b"")
    assert b"Hello! Ask me about a module" in read_until(terminal, b"\n> ", shown)
    os.write(terminal, key)
    assert chat.wait(10) == status
    os.close(terminal)
