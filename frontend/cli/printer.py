"""A printer of several streams in the order of their prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sidestep.ipc.common.logs import tell


class Printer:
    """A printer of several streams, one after the other.

    The first is printed as it comes, the others when it is their turn.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._pending = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._turn = -1
        self._next()

    def add(self, index: int, text: str, ended: bool) -> None:
        """Add new text of one stream."""
        self._pending[index] += text
        self._ended[index] = ended
        while self._turn < len(self._prompts):
            sys.stdout.write(self._pending[self._turn])
            self._pending[self._turn] = ""
            if not self._ended[self._turn]:
                break
            sys.stdout.write("\n")
            self._next()
        sys.stdout.flush()

    def _next(self) -> None:
        self._turn += 1
        if self._turn == len(self._prompts):
            return
        if self._turn:
            sys.stdout.write("\n")
        if len(self._prompts) > 1:
            sys.stdout.flush()
            tell(f"--- {self._turn + 1}")
        sys.stdout.write(self._prompts[self._turn])
