"""Bytecode of Sidestep's modules, which an installation from a package writes."""

from __future__ import annotations

import compileall
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2] / "sidestep"


def write_bytecode() -> None:
    """Write it where it is missing: a checkout's first start would do it, module by module."""
    for folder in (_PACKAGE, *filter(Path.is_dir, _PACKAGE.iterdir())):
        compileall.compile_dir(folder.resolve(), quiet=1)
