"""The packaging rule: folders at the root, one package `sidestep` with links, nothing else in an install."""

import os
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import build_meta

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("ipc", "kernels", "executor", "engine_core", "frontend")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_package_links_to_the_folder(folder: str) -> None:
    link = ROOT / "sidestep" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_root_folder_is_no_package_of_its_own(folder: str) -> None:
    # transformers, for one, runs ./kernels/__init__.py as if it were the `kernels` package.
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_is_named_like_a_standard_library_module() -> None:
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            assert file.stem == "__init__" or file.stem not in sys.stdlib_module_names, file


def test_nothing_is_reexported_except_by_the_facade() -> None:
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("__init__.py"):
            assert "import" not in file.read_text(), file


def test_torch_is_taken_as_a_range_with_both_ends() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]


def test_the_wheel_holds_the_package_with_its_default_model_and_nothing_else(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("sidestep", "examples", "pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        os.symlink(ROOT / name, copy / name)
    monkeypatch.chdir(copy)
    wheel = build_meta.build_wheel(str(tmp_path))
    names = zipfile.ZipFile(tmp_path / wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"sidestep", "sidestep-0.1.0.dist-info"}
    for expected in ("py.typed", "engine_core/scheduler.py", "kernels/rms_norm.py", "executor/models/llama.py",
                     "frontend/server/app.py", "frontend/server/web/index.html", "frontend/server/web/main.js",
                     "frontend/parsers/hermes.py",
                     "tiny-python/model.safetensors", "tiny-python/tokenizer.json", "tiny-python/config.json"):
        assert f"sidestep/{expected}" in names
