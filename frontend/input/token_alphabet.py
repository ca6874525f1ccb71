"""The bytes that a token of a vocabulary stands for, by how its tokenizer writes them."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones of Latin-1 for
    themselves, the others, in order, from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }


class TokenAlphabet:
    """How one tokenizer's vocabulary is written."""

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

    def bytes_of(self, token: str) -> bytes:
        """Of a token as the vocabulary has it."""
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._falls_back and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return token.encode()


def _steps(decoder: Decoder | None) -> list[dict[str, Any]]:
    """A sequence's decoders, or the one there is, as the tokenizer's file has them."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state.get("type") == "Sequence" else [state]
