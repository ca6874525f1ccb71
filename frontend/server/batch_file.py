"""OpenAI's batch files: an input with one request per line, an output with one answer per line."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from sidestep.frontend.server.transport.lines import encode_line
from sidestep.ipc.common.errors import ValidationError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_ID = "batch_req_"
_BEGINNING = b'{"id":"' + _ID.encode()
"""First bytes of every line of an output."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input. Its body is the body of a request to the URL's route."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Reason why a line was not run at all."""

    code: str
    message: str
    line: int
    """Number of the line in the input, from 1."""


class BatchResponse(msgspec.Struct):
    """Answer of the route, which may be an error."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str = msgspec.field(default_factory=lambda: f"{_ID}{uuid.uuid4().hex}")
    custom_id: str | None
    """None if the input's line has no custom_id that could be read."""
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the route answered with status 200."""
        return self.response is not None and self.response.status_code == 200


@dataclass
class Written:
    """Results that an output already holds, from an earlier run."""

    succeeded: dict[str, bool] = field(default_factory=dict)
    """custom_id -> whether its request succeeded."""
    broken: set[int] = field(default_factory=set)
    """Numbers of the input's lines that were not run."""
    size: int = 0
    """Bytes of the output's complete lines."""


@dataclass
class Plan:
    """Work that remains for an input."""

    requests: list[BatchRequest] = field(default_factory=list)
    broken: list[BatchResult] = field(default_factory=list)
    skipped: int = 0
    """Number of lines whose result the output already holds."""
    failed_before: int = 0
    """Number of skipped lines that failed in an earlier run."""


class _Broken(Exception):
    """Error of a line that cannot be run."""

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
    """Return the lines of an input that are still to be run. Empty lines are skipped."""
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
    """Return the results that an output file already holds.

    Raises ValidationError for a file that is no output of a batch, so that it is left as it is.
    """
    written, number = Written(), 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            # An earlier run was ended while it wrote this line. The line's request is run again.
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
            # Identify the line by its number: a broken line may lack a custom_id, or share it with
            # another line.
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
    """File to which results are appended.

    Each line is complete in the file before the next one is written.
    """

    def __init__(self, path: str) -> None:
        """Open the file, read its results, and cut off an incomplete last line.

        Raises ValidationError for a file that is no output of a batch, and OSError.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with open(path, "rb") as file:
                self.written = read_output(file)
            # Remove the incomplete line of an earlier run.
            os.ftruncate(self._fd, self.written.size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, result: BatchResult) -> None:
        """Append one result as a line."""
        line = memoryview(encode_line(result) + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
