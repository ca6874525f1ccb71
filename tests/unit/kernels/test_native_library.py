"""Libraries of kernels in C that a machine cannot build."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch  # noqa: F401  # brings GCC's OpenMP

from sidestep.kernels.native import library


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_a_library_that_cannot_be_built_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix of a model asks for it, and a compiler takes a second to fail."""
    tries = list[Path]()
    build = library._build

    def counted(file: Path, compiler: str, flags: list[str], made: Path) -> None:
        tries.append(made)
        build(file, compiler, flags, made)

    monkeypatch.setattr(library, "_build", counted)
    monkeypatch.setattr(library, "_folder", tmp_path)
    for _ in range(3):
        with pytest.raises(library.NoLibraryError, match=r"cannot build coded\.c"):
            library.load("coded.c", "number=1+")
    assert len(tries) == 1
    # Another form of the same file is another library.
    with pytest.raises(library.NoLibraryError, match=r"cannot build coded\.c"):
        library.load("coded.c", "number=2+")
    assert len(tries) == 2
