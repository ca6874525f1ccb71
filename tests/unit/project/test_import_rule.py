"""The import rule of docs/architecture.md, read from the source.

Lazy and TYPE_CHECKING imports count.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("ipc", "kernels", "executor", "engine_core", "frontend")
ALLOWED: dict[str, tuple[str, ...]] = {
    "ipc": (),
    "kernels": (),
    "executor": ("ipc", "kernels"),
    "engine_core": ("ipc", "executor.base"),
    "frontend": ("ipc",),
    # The facade's own modules that have the names of vLLM's.
    "sidestep": ("frontend", "ipc", "engine", "inputs"),
}
TORCH_FREE = ("ipc", "engine_core", "frontend", "sidestep")
BRINGS_TORCH = ("torch", "transformers", "triton", "safetensors.torch", "accelerate")


def imports(file: Path) -> Iterator[str]:
    """Return the absolute names of all modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            yield module
            # `from sidestep.executor import base` names a module too.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def sources(folder: str) -> list[Path]:
    if folder == "sidestep":
        return sorted(
            file
            for file in (ROOT / "sidestep").rglob("*.py")
            if file.relative_to(ROOT / "sidestep").parts[0] not in FOLDERS
        )
    return sorted((ROOT / folder).rglob("*.py"))


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("folder", ALLOWED)
def test_each_folder_imports_only_what_the_rule_allows(folder: str) -> None:
    own = "sidestep" if folder == "sidestep" else f"sidestep.{folder}"
    allowed = [f"sidestep.{name}" for name in ALLOWED[folder]]
    for file in sources(folder):
        for name in imports(file):
            # A bare `sidestep` or `sidestep.executor` is only the parent of what follows it.
            if not is_within(name, "sidestep") or any(is_within(a, name) for a in (own, *allowed)):
                continue
            fine = (
                folder != "sidestep"
                and is_within(name, own)
                or any(is_within(name, a) for a in allowed)
            )
            assert fine, f"{file.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_frontend_core_and_ipc_do_not_import_torch_even_through_a_library(folder: str) -> None:
    for file in sources(folder):
        for name in imports(file):
            assert not any(is_within(name, lib) for lib in BRINGS_TORCH), (
                f"{file.relative_to(ROOT)} imports {name}"
            )


def test_no_environment_variable_is_read_outside_the_config() -> None:
    for folder in FOLDERS:
        for file in sources(folder):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Subscript | ast.Call)
                    and "os.environ" in ast.unparse(node)[:40]
                ):
                    assert file == ROOT / "ipc" / "config.py", (
                        f"{file.relative_to(ROOT)}: {ast.unparse(node)}"
                    )
                assert not (isinstance(node, ast.Attribute) and node.attr == "getenv"), file
                # An import within an expression would hide what is read.
                assert not (isinstance(node, ast.Name) and node.id == "__import__"), file


def test_nothing_is_pickled() -> None:
    for folder in FOLDERS:
        for file in sources(folder):
            assert not {"pickle", "cloudpickle", "marshal", "shelve"} & {
                n.split(".")[0] for n in imports(file)
            }, file
