"""Files with a JSON object a line: prompts, answers and their options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sidestep.frontend.evaluation.subject import Subject
from sidestep.ipc.common.errors import ValidationError

T = TypeVar("T")
Row = TypeVar("Row", bound="PromptRow")


class PromptRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line with a prompt, which is sent as it is, or with messages for the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs one of prompt and messages")

    def ids(self, subject: Subject) -> list[int]:
        """Return the prompt's token ids for a model. Raises ValidationError."""
        if self.messages is not None:
            return subject.chat_ids(self.messages)
        return subject.text_ids(self.prompt or "")


def read_rows(option: str, path: str, kind: type[Row]) -> tuple[dict[str, Row], str]:
    """Return the lines of a file by their names, such as 'line 3', and the file's digest.

    Empty lines are skipped. Raises ValidationError for the option, which names the line and the
    unknown or wrong field; OSError.
    """
    content = Path(path).read_bytes()
    decoder = msgspec.json.Decoder(kind)
    rows = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            name = f"line {number}"
            try:
                rows[name] = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValidationError(option, f"{path}, {name}: {error}") from None
    if not rows:
        raise ValidationError(option, f"{path} has no lines")
    return rows, hashlib.sha256(content).hexdigest()


def of_line(option: str, path: str, name: str, make: Callable[[], T]) -> T:
    """Return what `make` makes of a line; its ValidationError names the option and the line."""
    try:
        return make()
    except ValidationError as error:
        raise ValidationError(option, f"{path}, {name}: {error}") from None
