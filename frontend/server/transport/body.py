"""Read the body of a request, and decode it to a struct. Errors name the field that is wrong."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from sidestep.frontend.server.transport.errors import ApiError, ClientGoneError, refused

T = TypeVar("T")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")

_SPELLING = re.compile(r"^Object contains unknown field|^Expected `int.*got `float`")
"""Errors of bodies that may be valid after `_plain`."""
_CLIENTS_OWN = frozenset(
    ("parameters", "schema", "json", "structural_tag", "chat_template_kwargs", "metadata")
)
"""Fields whose values belong to the client and stay unchanged.

In a JSON schema, for example, null and 1.0 have meanings of their own."""
_EXACT = 2**53
"""From this magnitude on, floats do not hold every whole number."""
_MEDIA = frozenset(("image_url", "input_audio", "video_url", "audio_url", "file", "file_data"))
_TEXT_ONLY = "the models of this server read text alone: no images, audio, video or files"
_ONE_KIND = {
    re.compile(r"\bcontent\[\d+\]\.type$"): _TEXT_ONLY,
    re.compile(r"^tools\[\d+\]\.type$"): "functions are the only tools of this server",
}
"""Pattern of a path that takes one kind of object -> the message for OpenAI's other kinds."""


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Return the body of a request, which may have at most `limit` bytes.

    Raises ApiError (408, 413, 415), and ClientGoneError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers let a page of another origin send other types without a preflight; see guard.py.
        raise ApiError(
            415, f"the body must be application/json, not {kind or 'without a content-type'}"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408, f"the body has not come within {timeout_s:g} s", headers={"connection": "close"}
        ) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the struct of a JSON text.

    Unknown fields whose value is null are ignored, and whole numbers may be written as 1.0, because
    clients send both. Raises ApiError (400).
    """
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if _SPELLING.search(str(error)) is None:
                raise
        return msgspec.convert(_plain(msgspec.json.decode(data)), decoder.type, str_keys=True)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def _plain(value: Any) -> Any:
    """Return the value without nulls, and with whole numbers as int.

    The client's own values stay as they are.
    """
    if isinstance(value, dict):
        return {
            key: item if key in _CLIENTS_OWN else _plain(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def _wrong_field(message: str) -> ApiError:
    """Return the error for a message of msgspec.

    The message ends with a path such as `$.messages[0].role`, which the error names as its field.
    """
    path = _PATH.search(message)
    at = path["path"] if path else ""
    text = message[: path.start()] if path else message
    if (unknown := _UNKNOWN.search(text)) is not None:
        if unknown["name"] in _MEDIA:
            return refused(_join(at, unknown["name"]), _TEXT_ONLY, "unsupported_field")
        return refused(
            _join(at, unknown["name"]),
            "is not a field of this request; nothing is accepted and ignored",
            "unknown_field",
        )
    if (missing := _MISSING.search(text)) is not None:
        return refused(_join(at, missing["name"]), "is required", "missing_field")
    for pattern, sentence in _ONE_KIND.items():
        if pattern.search(at) is not None:
            return refused(at, f"{sentence} ({text})", "unsupported_field")
    return refused(at, text) if at else ApiError(400, text)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
