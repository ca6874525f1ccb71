"""Beginnings of prompts that the operator declares public.

Tenants share the cached blocks of public prefixes, and no others. A salt separates the blocks of
each tenant (guard.py). It enters the chain of a prompt's block hashes at the first block that has
tokens beyond the public prefix, and it is a part of every later hash. So shared blocks hold public
tokens only. A faster answer reveals only that another tenant has sent these tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import msgspec

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import ValidationError


class PublicPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file, which has one of the two fields."""

    text: str | None = None
    """Beginning of prompts of completions."""
    messages: list[dict[str, Any]] | None = None
    """First messages of conversations, most often a system message alone."""


class PublicPrefixes:
    """Public prefixes of a server, as token ids."""

    def __init__(self, prefixes: list[list[int]]) -> None:
        self.prefixes = prefixes

    @classmethod
    def of(cls, entries: Sequence[PublicPrefix], tokenizer: Tokenizer) -> Self:
        """Return the prefixes of these lines.

        Raises ValidationError for messages that the model's template refuses.
        """
        try:
            return cls([_ids(entry, tokenizer) for entry in entries])
        except ValidationError as error:
            raise ValidationError("public_prefixes", str(error)) from None

    def length(self, prompt: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens are those of a prefix.

        A part of a prefix counts too, because the text that follows a prefix may become a part of
        the prefix's last token.
        """
        return max((_num_common(prefix, prompt) for prefix in self.prefixes), default=0)


def read_public_prefixes(file: str | None, keys: Collection[str]) -> list[PublicPrefix]:
    """Return the lines of the file; none without a file.

    Raises ValidationError, which names a line that is wrong.
    """
    if file is None:
        return []
    if len(keys) < 2:
        raise ValidationError(
            "public_prefixes", "has a meaning only with several API keys: with fewer all is shared"
        )
    try:
        # JSON may hold the line ends of Unicode. `splitlines` of bytes does not know them.
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ValidationError("public_prefixes", f"{file} cannot be read: {error}") from None
    entries = [
        _entry(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not entries:
        raise ValidationError("public_prefixes", f"{file} holds none")
    return entries


def _entry(line: bytes, source: str) -> PublicPrefix:
    try:
        entry = msgspec.json.decode(line, type=PublicPrefix)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValidationError("public_prefixes", f"{source}: {error}") from None
    if bool(entry.text) == bool(entry.messages):
        raise ValidationError("public_prefixes", f"{source}: must have either text or messages")
    return entry


def _ids(entry: PublicPrefix, tokenizer: Tokenizer) -> list[int]:
    if entry.messages is None:
        return tokenizer.encode(entry.text or "")
    # The prefix is the beginning that the template gives to every conversation with these messages.
    # Two conversations that go on differently have it in common.
    one, two = (
        tokenizer.encode(
            tokenizer.render_chat([*entry.messages, {"role": "user", "content": text}]), False
        )
        for text in ("a", "b")
    )
    return one[: _num_common(one, two)]


def _num_common(one: Sequence[int], two: Sequence[int]) -> int:
    if one == two[: len(one)]:
        return len(one)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
