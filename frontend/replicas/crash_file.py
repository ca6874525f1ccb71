"""The files that say what a replica did before it died: one for each death, the newest are kept.

A file has what the core has noted (ipc/transport/black_box.py), the cause, the versions and the
engine's options. No text and no token of a request is in it.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import EngineConfig, state_folder_of_environment
from sidestep.ipc.transport.black_box import Flight, NotedRequest, Recorded
from sidestep.ipc.transport.messages import Ready
from sidestep.ipc.transport.records import StepRecord

logger = logging.getLogger(__name__)

FORMAT = "sidestep crash 1"
MOST_FILES = 8
"""Files that are kept in a folder."""
LAST_S = 10.0
"""Seconds before the death whose steps are in the file."""
_PACKAGES = ("sidestep", "torch", "triton", "numpy", "msgspec", "pyzmq", "tokenizers")
_counter = itertools.count()


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a file. Times are in nanoseconds of the machine's monotonic clock."""

    format: str = FORMAT
    time: str
    """Time of the death in UTC, in ISO format."""
    time_ns: int
    replica: int
    cause: str
    origin: str
    """'worker', 'core', 'stall', 'message', 'start' or 'host'."""
    device: str
    pids: list[int]
    """The process ids of the core and of the ranks, in this order."""
    versions: dict[str, str]
    options: dict[str, dict[str, Any]]
    """The engine's options by section."""
    flights: list[Flight]
    """The steps that were running or queued, oldest first."""
    requests: list[NotedRequest]
    """The requests that had not ended."""
    step_fields: list[str]
    steps: list[list[int]]
    """The last steps that came back; each has a number for each of step_fields."""
    deliveries: list[list[int]]
    """Deliveries of tokens to readers in the frontend that wrote the file: number, begin, end and
    number of tokens."""

    @property
    def step_records(self) -> list[StepRecord]:
        """The last steps that came back, oldest first."""
        return [StepRecord(**dict(zip(self.step_fields, row, strict=True))) for row in self.steps]


def read_crash(path: str) -> Crash:
    """Return the contents of a file. Raises ValidationError for another file, and OSError."""
    try:
        crash = msgspec.json.decode(Path(path).read_bytes(), type=Crash)
    except ValueError as error:  # also of bytes that are no UTF-8
        raise ValidationError("crash", f"{path} is no crash file: {error}") from None
    if crash.format != FORMAT:
        raise ValidationError("crash", f"{path} has the format {crash.format!r}, not {FORMAT!r}")
    return crash


class CrashFiles:
    """Writes the files of one engine."""

    def __init__(
        self, config: EngineConfig, deliveries: Callable[[], Sequence[tuple[int, int, int, int]]]
    ) -> None:
        """Write nothing yet. deliveries: returns those of this frontend, for the file."""
        self._config = config
        self._deliveries = deliveries

    @property
    def folder(self) -> Path | None:
        """The folder of the files; None if the user has no home."""
        if self._config.frontend.crash_dir is not None:
            return Path(self._config.frontend.crash_dir)
        state = state_folder_of_environment()
        return None if state is None else state / "crashes"

    def write(
        self, replica: int, cause: str, origin: str, last: Ready | None, recorded: Recorded | None
    ) -> Path | None:
        """Write the file of a death, and return its path; None if it cannot be written.

        last: the replica's message when it began to serve. recorded: what its core has noted.
        """
        if (folder := self.folder) is None:
            return None
        crash = self._crash(replica, cause, origin, last, recorded)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"crash-{stamp}-{os.getpid()}-{next(_counter):03d}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(folder / name, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(crash) + b"\n")
            _remove_old(folder)
        except OSError as error:
            logger.warning("the crash file of replica %d cannot be written: %s", replica, error)
            return None
        return folder / name

    def _crash(
        self, replica: int, cause: str, origin: str, last: Ready | None, recorded: Recorded | None
    ) -> Crash:
        steps, flights, requests = recorded or Recorded([], [], [])
        now = time.monotonic_ns()
        begin = now - int(LAST_S * 1e9)
        names = [field.name for field in fields(StepRecord)]
        config = self._config
        sections = (config.model, config.cache, config.scheduler, config.parallel, config.frontend)
        return Crash(
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            time_ns=now,
            replica=replica,
            cause=cause,
            origin=origin,
            device="" if last is None else last.device,
            pids=[] if last is None else [last.core_pid, *last.worker_pids],
            versions=versions(),
            options={
                type(section).__name__.removesuffix("Config").lower(): msgspec.to_builtins(section)
                for section in sections
            },
            flights=flights,
            requests=requests,
            step_fields=names,
            steps=[
                [getattr(step, name) for name in names] for step in steps if step.told_ns >= begin
            ],
            deliveries=[list(one) for one in self._deliveries() if one[2] >= begin],
        )


def versions() -> dict[str, str]:
    """Return the versions of what the engine runs on, as far as it is installed."""
    from importlib import metadata  # slow to import, and rarely needed

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _remove_old(folder: Path) -> None:
    """Remove all files but the newest."""
    found = sorted(folder.glob("crash-*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in found[:-MOST_FILES]:
        path.unlink(missing_ok=True)
