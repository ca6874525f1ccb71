"""What a request asks of its logits beyond the columns that every request has: sent to the workers
once, as bytes, when it enters a slot, and not at all by plain requests.

The frontend makes it from the sampling parameters; the core passes the bytes on without looking at
them.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_BAD_WORD_TOKENS = 32


class Controls(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The defaults ask for nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """As in ipc.sampling_params."""
    allowed_token_ids: list[int] = []
    """No other tokens may be sampled; empty for all."""
    bad_words: list[list[int]] = []
    """Tokens of which the last must not follow the others, of at most MAX_BAD_WORD_TOKENS."""
    logprobs: int = -1
    """Of each sampled token: how many of the most probable tokens besides it; -1 for not even its
    own."""
    prompt_logprobs: int = -1
    """The same of each token of the prompt."""
    extra_args: dict[str, Any] = {}
    """For logits processors, by the names of their classes."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    has_grammar: bool = False
    """Steps that sample for it await masks."""
    is_beam: bool = False
    """Asks for logprobs alone, and comes without the tokens that are in the cache."""


_PLAIN = Controls()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Controls)


def encode_controls(controls: Controls) -> bytes:
    """As bytes; none if nothing is asked for."""
    return b"" if controls == _PLAIN else _encoder.encode(controls)


def decode_controls(data: bytes | memoryview) -> Controls:
    """What encode_controls made."""
    return _decoder.decode(data) if data else _PLAIN


GRAMMAR_ALONE = encode_controls(Controls(has_grammar=True))
"""Of a request that asks for nothing but a grammar."""
