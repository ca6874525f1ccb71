"""The alphabet of a vocabulary, which gives the bytes that a token stands for."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def byte_characters() -> dict[str, int]:
    """Return the characters that byte-level vocabularies write bytes with.

    Printable characters of Latin-1 stand for themselves; the others, in order, are written from
    U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }


class TokenAlphabet:
    """The way in which one tokenizer's vocabulary is written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _steps(tokenizer.decoder)
        kinds = {str(step.get("type")) for step in steps}
        self._bytes = byte_characters() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        self._replaced = [
            (str(step["pattern"]["String"]), str(step["content"]))
            for step in steps
            if step.get("type") == "Replace" and "String" in step.get("pattern", {})
        ]
        self._replaced += [
            (str(step["replacement"]), " ") for step in steps if step.get("type") == "Metaspace"
        ]
        self._replaced += [
            (str(step["suffix"]), " ") for step in steps if step.get("type") == "BPEDecoder"
        ]
        self._continued = [str(step["prefix"]) for step in steps if step.get("type") == "WordPiece"]
        """The beginning of tokens that go on with a word; others begin one, after a space."""

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token, given as the vocabulary writes it."""
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._falls_back and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        for prefix in self._continued:
            token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        return token.encode()


def _steps(decoder: Decoder | None) -> list[dict[str, Any]]:
    """Return a sequence's decoders, or the only one.

    They have the form of the tokenizer's file.
    """
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state.get("type") == "Sequence" else [state]
