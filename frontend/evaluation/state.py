"""Results of finished units, in memory and in a file, so that an interrupted run goes on.

The file has a JSON object a line: first what the results depend on, then a line for each result.
Each line is complete in the file before the next one is written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from sidestep.frontend.evaluation.units import Result
from sidestep.ipc.common.errors import ValidationError

FORMAT = 1
"""Version of the file's format."""
_BEGINNING = b'{"sidestep_eval":'
_FILE_OPTION = "state"


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    sidestep_eval: int
    options: dict[str, Any]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    result: Result


class State:
    """The results of finished units by their keys."""

    def __init__(self, path: str | None, options: Mapping[str, Any]) -> None:
        """Open the file and read its results; without a path, keep them in memory alone.

        options: what the results depend on. Raises ValidationError for a file of another run or
        kind, or one that another process uses, and leaves it as it is; OSError.
        """
        self.results: dict[str, Result] = {}
        self._fd: int | None = None
        if path is None:
            return
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._begin(path, msgspec.json.decode(msgspec.json.encode(options)))
        except BaseException:
            self.close()
            raise

    def add(self, key: str, result: Result) -> None:
        """Keep a result."""
        self.results[key] = result
        if self._fd is not None:
            self._write(_Line(key, result))

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, path: str, options: dict[str, Any]) -> None:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValidationError(_FILE_OPTION, f"another process uses {path}") from None
        with open(path, "rb") as file:
            lines = file.read().splitlines(keepends=True)
        if lines and not (lines[0].startswith(_BEGINNING) or _BEGINNING.startswith(lines[0])):
            raise ValidationError(_FILE_OPTION, f"{path} is not of an evaluation; give a new file")
        if lines and not lines[-1].endswith(b"\n"):
            # An earlier run ended while it wrote this line.
            os.ftruncate(self._fd, sum(map(len, lines[:-1])))
            del lines[-1]
        if not lines:
            self._write(_Head(FORMAT, options))
            return
        try:
            head = msgspec.json.decode(lines[0], type=_Head)
            found = [msgspec.json.decode(line, type=_Line) for line in lines[1:]]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValidationError(_FILE_OPTION, f"{path} cannot be read: {error}") from None
        if head.sidestep_eval != FORMAT:
            raise ValidationError(_FILE_OPTION, f"{path} is of another version; give a new file")
        _check_same(path, head.options, options)
        self.results = {line.key: line.result for line in found}

    def _write(self, entry: _Head | _Line) -> None:
        assert self._fd is not None
        line = memoryview(msgspec.json.encode(entry) + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]


def _check_same(path: str, kept: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ValidationError, which names the first option that differs."""
    for name in dict.fromkeys((*kept, *options)):
        before, now = kept.get(name), options.get(name)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                inner = next(n for n in (*before, *now) if before.get(n) != now.get(n))
                name, before, now = f"{name}.{inner}", before.get(inner), now.get(inner)
            raise ValidationError(
                _FILE_OPTION,
                f"{path} is of an evaluation with other options: {name} was {_shown(before)}, "
                f"and is {_shown(now)}; give a new file",
            )


def _shown(value: object) -> str:
    """Return an option's value as text: of a model with its options, the model alone."""
    return repr(value.get("model") if isinstance(value, dict) else value)
