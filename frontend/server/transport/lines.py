"""Encode JSON that every reader takes as one line.

JSON may hold U+0085, U+2028 and U+2029 as they are, and a model writes them now and then. Readers
that go by Unicode's line ends, such as `str.splitlines` of Python, cut a text there: a line of a
file, or an event of a stream. Escaped, the values are the same and no reader cuts them.
"""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


def encode_line(value: object) -> bytes:
    """Return a value as JSON without any line end of Unicode.

    msgspec escapes those of ASCII itself.
    """
    data = _encode(value)
    return data if data.isascii() else _escape(data)


def _escape(data: bytes) -> bytes:
    # In JSON, characters outside ASCII are within strings only.
    return (
        data.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )
