"""`import sidestep`: the names that users need; no module is imported before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import sidestep


@pytest.mark.parametrize("name", sidestep.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sidestep, name) is not None and name in dir(sidestep)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert sidestep.__version__ == metadata.version("sidestep")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'sidestep' has no attribute 'AsyncLM'"):
        sidestep.AsyncLM  # noqa: B018


def test_importing_it_imports_nothing_else_of_ours() -> None:
    code = (
        "import sys, sidestep; names = ('sidestep.', 'msgspec', 'zmq')\n"
        "print([n for n in sys.modules if n.startswith(names)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_it_imports_no_archives_or_temporary_files() -> None:
    """Each process of an engine imports it first.

    `importlib.abc` would cost all of them these modules.
    """
    code = (
        "import sys, sidestep; names = ('importlib.abc', 'tempfile', 'lzma')\n"
        "print([n for n in names if n in sys.modules])"
    )
    root = Path(sidestep.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == "[]"
