"""Beginnings of prompts that the operator declares public: tenants share their cached blocks, and
no others.

Tenants' blocks are told apart by a salt (guard.py). It enters the chain of a prompt's block hashes
at the first block that is not wholly made of a public prefix's tokens, and is a part of every hash
from there on. So what is shared holds public tokens alone, and what a faster answer can tell of
other tenants is that one of them has sent these.
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
    """One line of the file: either of the two."""

    text: str | None = None
    """What prompts of completions begin with."""
    messages: list[dict[str, Any]] | None = None
    """What conversations begin with, most often a system message alone."""


class PublicPrefixes:
    """All of them, as token ids."""

    def __init__(self, prefixes: list[list[int]]) -> None:
        self.prefixes = prefixes

    @classmethod
    def of(cls, entries: Sequence[PublicPrefix], tokenizer: Tokenizer) -> Self:
        """Raises ValidationError for messages that the model's template refuses."""
        try:
            return cls([_ids(entry, tokenizer) for entry in entries])
        except ValidationError as error:
            raise ValidationError("public_prefixes", str(error)) from None

    def length(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens are those of a prefix. Not all of one need be there:
        where a text ends, what follows may be a part of its last token.
        """
        return max((_num_common(prefix, prompt) for prefix in self.prefixes), default=0)


def read_public_prefixes(file: str | None, keys: Collection[str]) -> list[PublicPrefix]:
    """The file's lines. Raises ValidationError, which names a line that is wrong."""
    if file is None:
        return []
    if len(keys) < 2:
        raise ValidationError(
            "public_prefixes", "has a meaning only with several API keys: with fewer all is shared"
        )
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError("public_prefixes", f"{file} cannot be read: {error}") from None
    entries = [
        _entry(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not entries:
        raise ValidationError("public_prefixes", f"{file} holds none")
    return entries


def _entry(line: str, place: str) -> PublicPrefix:
    try:
        entry = msgspec.json.decode(line, type=PublicPrefix)
    except msgspec.DecodeError as error:
        raise ValidationError("public_prefixes", f"{place}: {error}") from None
    if bool(entry.text) == bool(entry.messages):
        raise ValidationError("public_prefixes", f"{place}: must have either text or messages")
    return entry


def _ids(entry: PublicPrefix, tokenizer: Tokenizer) -> list[int]:
    if entry.messages is None:
        return tokenizer.encode(entry.text or "")
    # What the template makes of these messages whatever follows: what two conversations that go on
    # have in common.
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
