"""Bounds on the text of one token, with which a text that cannot fit is refused by its length.

A bound must hold for every text: a text that fits must not be refused. So the bound follows from
the changes that each part of a tokenizer may make to a text. If a part may drop text, or join text
of any length into one token, there is no bound, and the text is tokenised to be counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

from sidestep.frontend.input.token_alphabet import byte_characters

_COMPOSED = 4
"""Largest number of characters that one composed character of Unicode is made of."""
_SHRINKAGE = {
    "NFC": _COMPOSED,
    "NFKC": _COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""The largest number of characters of a text that become one, by kind of normalizer."""
_KEEPING = frozenset(("ByteLevel", "Digits", "Metaspace", "UnicodeScripts"))
"""Pre-tokenizers that only cut.

Some others only cut too, with most of their settings.
"""
_PIECE = 1 << 16
"""Bytes that are counted in one call.

The call holds the interpreter lock for a millisecond or two.
"""


class TextBound:
    """Lower bounds on the number of a text's tokens, for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        normalizers = list(_parts(tokenizer.normalizer, "normalizers"))
        cutters = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
        added = tokenizer.get_added_tokens_decoder().values()
        absorbing = [token for token in added if token.lstrip or token.rstrip]
        self._tokenizer = tokenizer
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *cutters))
        self._is_plain = (
            not normalizers and self._is_byte_level and isinstance(tokenizer.model, BPE)
        )
        self._absorbing = [token.content for token in absorbing]
        self.characters: int | None = None
        """Largest number of characters of a text that one token stands for.

        None if there is no limit.
        """
        # An added token that absorbs whitespace matches only its own text if there is no
        # normalizer.
        if all(map(_keeps_all, cutters)) and not (
            normalizers and any(t.normalized for t in absorbing)
        ):
            self.characters = self._most_characters(normalizers)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the text's number of tokens, from its length alone."""
        if self.characters is None or self._may_absorb(text):
            return 0
        return -(-len(text) // self.characters)

    def counted_least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens from the text's bytes.

        Each byte counts as its share of the longest token that contains it. The call takes some 30
        ns a byte, and lets other threads run. Raises UnicodeEncodeError for lone surrogates.
        """
        if self.characters is None or not self._is_plain or self._may_absorb(text):
            return 0
        data, counts = text.encode(), Counter[int]()
        for begin in range(0, len(data), _PIECE):
            counts.update(data[begin : begin + _PIECE])
        return math.ceil(
            sum(Fraction(count, self._longest[byte]) for byte, count in counts.items())
        )

    def _may_absorb(self, text: str) -> bool:
        """Return whether the text contains added tokens that absorb all whitespace beside them."""
        return any(token in text for token in self._absorbing)

    def _most_characters(self, normalizers: list[dict[str, Any]]) -> int | None:
        factor = 1
        for part in normalizers:
            shrinkage = _shrinkage(part)
            if shrinkage is None:
                return None
            factor *= shrinkage
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not _knows_all(self._tokenizer.model, vocabulary, self._is_byte_level):
            return None
        return factor * max(map(len, vocabulary), default=1)

    @cached_property
    def _longest(self) -> list[int]:
        """The length in bytes of the longest token that contains each byte.

        It holds for a byte-level vocabulary.
        """
        alphabet = byte_characters()
        tokens = {
            bytes(alphabet[character] for character in token)
            for token in self._tokenizer.get_vocab(with_added_tokens=True)
            if all(character in alphabet for character in token)
        }
        tokens |= {
            token.content.encode() for token in self._tokenizer.get_added_tokens_decoder().values()
        }
        longest = [1] * 256
        for token in tokens:
            for byte in set(token):
                longest[byte] = max(longest[byte], len(token))
        return longest


def _parts(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer, or of each in a sequence.

    They have the form of a tokenizer's file.
    """
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), key)


def _flat(state: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for each in state[key]:
        yield from _flat(each, key)


def _shrinkage(part: dict[str, Any]) -> int | None:
    """Return the largest number of characters that a normalizer makes into one.

    None if there is no limit, or if it drops some.
    """
    if part["type"] == "Replace":
        found, made = part["pattern"].get("String"), part["content"]
        return None if not found or not made else -(-len(found) // len(made))
    return _SHRINKAGE.get(part["type"])


def _keeps_all(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops nothing."""
    if part["type"] in ("Split", "Punctuation"):
        return str(part["behavior"]) != "Removed"
    return part["type"] in _KEEPING


def _knows_all(model: Any, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Return whether each character that the vocabulary lacks costs at least one token.

    Such a character is neither dropped nor joined with others into one unknown token.
    """
    if isinstance(model, BPE):
        if is_byte_level and all(byte in vocabulary for byte in byte_characters()):
            return True
        if model.byte_fallback and _has_bytes(vocabulary):
            return True
        return model.unk_token is not None and not model.fuse_unk
    return (
        isinstance(model, Unigram)
        and _has_bytes(vocabulary)
        and bool(json.loads(model.__getstate__()).get("byte_fallback"))
    )


def _has_bytes(vocabulary: dict[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
