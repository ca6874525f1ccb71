"""OpenAI's batch files: requests, one a line, and the lines with their answers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from sidestep.ipc.common.errors import ValidationError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ID = "batch_req_"
_BEGINNING = b'{"id":"' + _ID.encode()
"""Of every line that is written here."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input; its body is what the URL's route takes."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line was not run at all."""

    code: str
    message: str
    line: int
    """Its number in the input, from 1."""


class BatchResponse(msgspec.Struct):
    """What the route has answered, be it a refusal."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str = msgspec.field(default_factory=lambda: f"{_ID}{uuid.uuid4().hex}")
    custom_id: str | None
    """None where the input's line has none that could be read."""
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def succeeded(self) -> bool:
        """Whether there is an answer, and it is no refusal."""
        return self.response is not None and self.response.status_code == 200


@dataclass
class Written:
    """What an output holds already, from a run before."""

    succeeded: dict[str, bool] = field(default_factory=dict)
    """Of each custom_id."""
    broken: set[int] = field(default_factory=set)
    """Lines of the input that were not run."""
    size: int = 0
    """Bytes of its whole lines."""


@dataclass
class Plan:
    """What there is to do for an input."""

    requests: list[BatchRequest] = field(default_factory=list)
    broken: list[BatchResult] = field(default_factory=list)
    skipped: int = 0
    """Lines that the output has already."""
    failed_before: int = 0
    """Those of them that have no good answer there."""


class _Broken(Exception):
    """A line that cannot be run."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _IdOnly(msgspec.Struct):
    custom_id: Any = None


class _StreamOnly(msgspec.Struct):
    stream: Any = None


_requests = msgspec.json.Decoder(BatchRequest)
_results = msgspec.json.Decoder(BatchResult)


def make_plan(lines: Iterable[bytes], written: Written) -> Plan:
    """What of an input is still to be done. Empty lines are none."""
    plan, seen = Plan(), set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _read(line)
            if request.custom_id in seen:
                raise _Broken(
                    "duplicate_custom_id", f"custom_id: a line before has {request.custom_id!r} too"
                )
            seen.add(request.custom_id)
            if (succeeded := written.succeeded.get(request.custom_id)) is None:
                plan.requests.append(request)
            else:
                plan.skipped += 1
                plan.failed_before += not succeeded
        except _Broken as error:
            if number in written.broken:
                plan.skipped += 1
                plan.failed_before += 1
            else:
                plan.broken.append(
                    BatchResult(
                        custom_id=_id_of(line), error=BatchError(error.code, str(error), number)
                    )
                )
    return plan


def _read(line: bytes) -> BatchRequest:
    try:
        request = _requests.decode(line)
    except msgspec.ValidationError as error:
        raise _Broken("invalid_line", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Broken("invalid_json_line", f"the line is not valid JSON: {error}") from None
    if request.method != "POST":
        raise _Broken("invalid_method", f"method: must be 'POST', not {request.method!r}")
    if request.url not in URLS:
        raise _Broken("invalid_url", f"url: must be one of {', '.join(URLS)}, not {request.url!r}")
    try:
        streamed = msgspec.json.decode(request.body, type=_StreamOnly).stream
    except msgspec.DecodeError:
        streamed = None  # the route says what is wrong with the body
    if streamed:
        raise _Broken(
            "unsupported_field", "body.stream: a line of a batch has one answer, in one piece"
        )
    return request


def _id_of(line: bytes) -> str | None:
    try:
        custom_id = msgspec.json.decode(line, type=_IdOnly).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def read_output(file: BinaryIO) -> Written:
    """What is there already. Raises ValidationError for a file that is something else: it is not to
    be touched.
    """
    written, number = Written(), 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            # The line that was being written when a run before was ended: its request is run again.
            if not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                raise _not_an_output(file, number)
            break
        written.size += len(line)
        try:
            result = _results.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _not_an_output(file, number) from None
        if result.response is None and result.error is None:
            raise _not_an_output(file, number)
        if result.error is not None:
            # By its number rather than its custom_id, which it may lack, or share with another
            # line.
            written.broken.add(result.error.line)
        elif result.custom_id is not None:
            written.succeeded[result.custom_id] = result.succeeded
    return written


def _not_an_output(file: BinaryIO, number: int) -> ValidationError:
    return ValidationError(
        "output_file",
        f"line {number} of {file.name} is not of a batch's output; "
        "give a new file, or the output of a run before",
    )


class OutputFile:
    """The results, appended to what was there. Each line is whole in the file before the next one
    is written.
    """

    def __init__(self, path: str) -> None:
        """Raises ValidationError, and OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with open(path, "rb") as file:
                self.written = read_output(file)
            # What is left of a line that a run before did not finish.
            os.ftruncate(self._fd, self.written.size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, result: BatchResult) -> None:
        """One more line."""
        line = memoryview(msgspec.json.encode(result) + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """No more lines."""
        os.close(self._fd)
