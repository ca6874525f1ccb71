"""The controls of a request's logits, beyond the columns that every request has.

They are sent to the workers once, as bytes, when the request enters a slot. Plain requests send
none. The frontend makes them from the sampling parameters; the core passes the bytes on without
looking at them.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_BAD_WORD_TOKENS = 32
"""Most tokens of one bad word."""


class Controls(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Controls of one request's logits. The defaults ask for nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """The three penalties are those of SamplingParams."""
    allowed_token_ids: list[int] = []
    """The only tokens that may be sampled; empty for all."""
    bad_words: list[list[int]] = []
    """Lists of tokens whose last must not follow the others, of at most MAX_BAD_WORD_TOKENS."""
    logprobs: int = -1
    """How many of the most probable tokens to report besides each sampled one.

    -1 reports not even the sampled one's log-probability.
    """
    prompt_logprobs: int = -1
    """The same number for each token of the prompt."""
    extra_args: dict[str, Any] = {}
    """Arguments of logits processors, by the names of their classes."""
    logit_bias: dict[int, float] = {}
    """Numbers that are added to the logits of these token ids."""
    has_grammar: bool = False
    """Whether steps that sample for it await masks."""
    is_beam: bool = False
    """Whether it is a beam, which asks for logprobs alone, and comes without its cached tokens."""


_PLAIN = Controls()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Controls)


def encode_controls(controls: Controls) -> bytes:
    """Return the controls as bytes; none if nothing is asked for."""
    return b"" if controls == _PLAIN else _encoder.encode(controls)


def decode_controls(data: bytes | memoryview) -> Controls:
    """Return the controls that encode_controls made bytes of."""
    return _decoder.decode(data) if data else _PLAIN


GRAMMAR_ALONE = encode_controls(Controls(has_grammar=True))
"""Encoded controls of a request that asks for nothing but a grammar."""
