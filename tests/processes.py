"""Processes that tests start, and those of engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join((str(ROOT), *filter(None, sys.path)))
"""Value of PYTHONPATH with which child processes find the same modules as this one."""

RUN_S = 100
"""Seconds that a program may take; its test then fails before the time limit ends all tests."""


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it has printed.

    options: those of subprocess.run. Raises subprocess.TimeoutExpired.
    """
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, **options)


def run_python(code: str) -> None:
    """Run Python code in a process of its own, which has nothing imported; it must succeed."""
    done = run(
        sys.executable,
        "-c",
        code,
        env={"PYTHONPATH": PYTHON_PATH, "PATH": ""},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended. It may end between any two calls."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cores(pid: int) -> list[psutil.Process]:
    """Return the engine cores that a process has started, in the order of their starts."""
    return [child for child in psutil.Process(pid).children() if _is_core(child)]


def _is_core(process: psutil.Process) -> bool:
    try:
        return bool(process.cmdline()[-1:] == ["engine core"])
    except psutil.NoSuchProcess:  # it has ended
        return False
