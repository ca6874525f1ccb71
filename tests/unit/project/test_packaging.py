"""The packaging rule: folders at the root, one package `sidestep` with links.

Nothing else is in an install.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import warnings
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


def test_the_versions_of_python_are_those_that_the_scripts_look_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / "scripts" / "install.sh").read_text()
    first, last = re.findall(r"\((3), (\d+)\)", script)
    assert project["requires-python"] == f">=3.{first[1]},<3.{int(last[1]) + 1}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the project to a folder and make it the current one: builds leave files behind."""
    copy = tmp_path / "source"
    (copy / "src").mkdir(parents=True)
    os.symlink(os.readlink(ROOT / "src" / "sidestep"), copy / "src" / "sidestep")
    for name in ("sidestep", "examples", "pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        os.symlink(ROOT / name, copy / name)
    monkeypatch.chdir(copy)
    return copy


def test_the_wheel_holds_the_package_with_its_default_model_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    wheel = build_meta.build_wheel(str(tmp_path))
    names = zipfile.ZipFile(tmp_path / wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"sidestep", "sidestep-0.1.0.dist-info"}
    for expected in (
        "py.typed",
        "engine_core/scheduling/scheduler.py",
        "kernels/ops/rms_norm.py",
        "ipc/model/families/llama.py",
        "frontend/server/app.py",
        "frontend/server/web/index.html",
        "frontend/server/web/main.js",
        "frontend/parsers/hermes.py",
        "ipc/vllm/options.py",
        "engine/arg_utils.py",
        "v1/engine/async_llm.py",
        "tiny-python/model.safetensors",
        "tiny-python/tokenizer.json",
        "tiny-python/config.json",
        "tiny-python/README.md",  # the default text of sidestep eval
    ):
        assert f"sidestep/{expected}" in names


SCRIPT = """from sidestep import LLM, AsyncLLM, EngineArgs, RequestOutput, SamplingParams


def complete(llm: LLM) -> list[RequestOutput]:
    return llm.generate(["def f("], SamplingParams(temperature=0))


async def stream(args: EngineArgs) -> str:
    async with AsyncLLM.from_engine_args(args) as llm:
        async for output in llm.generate("def f(", SamplingParams()):
            return output.outputs[0].text
    return ""


wrong: int = complete(LLM())[0].outputs[0].text
"""


@pytest.fixture
def installed(source: Path, tmp_path: Path) -> Path:
    """Return the Python of an environment with an editable install and this one's libraries."""
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names.append(build_meta.build_editable(str(tmp_path)))
    assert not [str(one.message) for one in caught if "ditable" in str(one.message)]
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    zipfile.ZipFile(tmp_path / names[0]).extractall(site)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return tmp_path / "venv" / "bin" / "python"


def test_an_editable_install_puts_one_folder_on_the_path_that_holds_the_package_alone(
    installed: Path, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (line,) = next((tmp_path / "venv").rglob("__editable__*.pth")).read_text().splitlines()
    assert Path(line) == source / "src"
    assert [p.name for p in Path(line).iterdir() if p.suffix != ".egg-info"] == ["sidestep"]
    assert (Path(line) / "sidestep" / "ipc").resolve() == ROOT / "ipc", (
        "new files are seen without another install"
    )
    assert "ditable installation" not in capfd.readouterr().err


def test_type_checkers_follow_an_editable_install(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(installed),
        "user.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    expected = "user.py:15: error: Incompatible types in assignment"
    assert done.stdout.splitlines()[0].startswith(expected), done.stdout + done.stderr
    assert "Found 1 error" in done.stdout


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_follows_an_editable_install(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SCRIPT)
    done = subprocess.run(
        ["pyright", "--pythonpath", str(installed), "user.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "user.py:15:" in done.stdout and "1 error," in done.stdout, done.stdout + done.stderr
