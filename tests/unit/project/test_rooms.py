"""The rooms: folders of few files, whose imports form no circle, and functions of a screen."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.unit.project.test_import_rule import FOLDERS, ROOT, imports

MOST_FILES = 14
"""Python files of a room."""
MOST_LINES = 500
"""Lines of a file."""
MOST_LINES_OF_A_FUNCTION = 70
"""Lines of a function outside kernels, whose language has no functions of their size."""


def python_files() -> list[Path]:
    """Return all Python files of the repository, by their paths from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def module_imports() -> dict[str, set[str]]:
    """Return the modules of the five folders, each with those of them that it imports."""
    files = {
        "sidestep." + ".".join(path.with_suffix("").parts): path
        for path in python_files()
        if path.parts[0] in FOLDERS
    }
    return {
        name: {found for found in imports(ROOT / path) if found in files and found != name}
        for name, path in files.items()
    }


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the sets of nodes that reach one another."""
    reach = {node: set(after) for node, after in graph.items()}
    for middle in reach:
        for node in reach:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    found: list[set[str]] = []
    for node, after in reach.items():
        circle = {other for other in after if node in reach[other]}
        if node in after and circle not in found:
            found.append(circle)
    return found


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": [], "f": ["f"]}
    assert circles(graph) == [{"a", "b", "c"}, {"f"}]


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside functions and for type checkers count."""
    assert circles(module_imports()) == []


def test_no_rooms_import_one_another_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for name, found in module_imports().items():
        room = name.rpartition(".")[0]
        others = {other.rpartition(".")[0] for other in found} - {room}
        rooms.setdefault(room, set()).update(others)
    assert circles(rooms) == []


def test_no_room_has_too_many_files() -> None:
    rooms = Counter(str(path.parent) for path in python_files())
    assert {room: count for room, count in rooms.items() if count > MOST_FILES} == {}


def test_no_file_is_too_long() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in python_files()}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    """A kernel is one function in Triton's language."""
    found = {}
    for path in python_files():
        if path.parts[0] == "kernels":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    found[f"{path}:{node.name}"] = length
    assert found == {}


def test_lines_are_short_on_average() -> None:
    """Lines of code that reads easily have 46 characters on average, without empty lines."""
    lines = [line for path in python_files() for line in (ROOT / path).read_text().splitlines()]
    lengths = [len(line) for line in lines if line.strip()]
    assert sum(lengths) <= 46 * len(lengths)
