"""What a request asks of its logits beyond the columns that every request has: sent to the workers once, as bytes, when
it enters a slot, and not at all by plain requests.

The frontend makes it from the sampling parameters; the core passes the bytes on without looking at them.
"""

from __future__ import annotations

import msgspec


class Controls(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The defaults ask for nothing."""

    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    has_grammar: bool = False
    """Steps that sample for it await masks."""


_PLAIN = Controls()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Controls)


def encode_controls(controls: Controls) -> bytes:
    """As bytes; none if nothing is asked for."""
    return b"" if controls == _PLAIN else _encoder.encode(controls)


def decode_controls(data: bytes | memoryview) -> Controls:
    """What encode_controls made."""
    return _decoder.decode(data) if data else _PLAIN
