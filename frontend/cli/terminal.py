"""Colours and a status line that is overwritten, for commands that write to a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from sidestep.ipc.config import colours_of_environment

_CLEAR_LINE = "\r\x1b[K"
_CODES = {"bad": "31", "quiet": "2"}


def painted(text: str, kind: str, file: TextIO) -> str:
    """Return the text in the colour of its kind ('bad', 'quiet').

    The text has no colour if the file is no terminal or colours are switched off.
    """
    if not file.isatty() or not colours_of_environment():
        return text
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m"


def tell(text: str, kind: str = "quiet") -> None:
    """Print a line on standard error."""
    print(painted(text, kind, sys.stderr), file=sys.stderr, flush=True)


class StatusLine:
    """A line on standard error that can be removed again.

    Nothing is written if standard error is no terminal.
    """

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Replace the line's text."""
        if sys.stderr.isatty():
            self._is_shown = True
            sys.stderr.write(_CLEAR_LINE + painted(text, "quiet", sys.stderr))
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
