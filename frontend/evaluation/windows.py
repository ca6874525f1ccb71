"""Windows over a text, which count each of its tokens once.

A model predicts a token from the tokens before it in the window. So windows overlap: each counts
only its last tokens, and the tokens before them are context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sidestep.ipc.common.errors import ValidationError


@dataclass(frozen=True)
class Window:
    """Tokens `begin` to `end` of a text, of which those from `first` on are counted."""

    begin: int
    first: int
    end: int

    @property
    def num_counted(self) -> int:
        """Tokens that this window counts."""
        return self.end - self.first


def make_windows(num_tokens: int, room: int, stride: int, num_before: int) -> Iterator[Window]:
    """Yield the windows over a text in order.

    num_tokens: tokens of the text. room: most tokens of a window, at least 1. stride: tokens that
    each window counts; the first counts all of its own. num_before: special tokens before each
    window. Without any, the first token of the text follows nothing and is not counted.
    """
    first = 0 if num_before else 1
    end = min(room, num_tokens)
    while first < num_tokens:
        yield Window(max(0, end - room), first, end)
        first, end = end, min(end + stride, num_tokens)


def check_sizes(context: int, stride: int | None, num_before: int) -> tuple[int, int]:
    """Return the room of a window for the text's tokens, and the stride.

    stride: None for half of the context. Raises ValidationError for sizes that leave a counted
    token without any before it.
    """
    room = context - num_before
    most = room if num_before else room - 1
    if most < 1:
        raise ValidationError("context", f"{context} leaves no token to predict")
    wanted = max(1, min(context // 2, most)) if stride is None else stride
    if wanted > most:
        raise ValidationError(
            "stride",
            f"{wanted} is more than the {most} tokens that a window of {context} can count",
        )
    return room, wanted
