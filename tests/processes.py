"""Processes that tests start, and those of engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join((str(ROOT), *filter(None, sys.path)))
"""Value of PYTHONPATH with which child processes find the same modules as this one."""


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended. It may end between any two calls."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cores(pid: int) -> list[psutil.Process]:
    """Return the engine cores that a process has started, in the order of their starts."""
    return [
        child for child in psutil.Process(pid).children() if child.cmdline()[-1] == "engine core"
    ]
