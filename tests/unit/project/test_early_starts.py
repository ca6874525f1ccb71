"""Kernels that let the next one start before they wait say so (kernels/launch.py).

The check of the order of launches trusts these marks: without one it would let a kernel read a
table that may not be complete.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from tests.unit.project.test_import_rule import ROOT

_LET_IN, _WAIT = "gdc_launch_dependents", "gdc_wait"


class Function(NamedTuple):
    """A function of the kernels' language."""

    marked: bool
    """Whether it has the decorator `opens_early`."""
    early: bool
    """Whether the next kernel is let in above the wait."""
    calls: set[str]


def calls(node: ast.AST) -> list[str]:
    """Return the names of the functions that are called, in the order of the lines."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    found.sort(key=lambda one: one.lineno)
    functions = [one.func for one in found]
    return [one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in functions]


def functions_of(source: str) -> dict[str, Function]:
    """Return the functions of a file that a decorator compiles."""
    found: dict[str, Function] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(one) for one in node.decorator_list
        ):
            called = calls(node)
            early = (
                _LET_IN in called
                and _WAIT in called
                and called.index(_LET_IN) < called.index(_WAIT)
            )
            marks = [ast.unparse(one) for one in node.decorator_list]
            found[node.name] = Function("opens_early" in marks, early, set(called))
    return found


def wrong_marks(functions: dict[str, Function]) -> list[str]:
    """Return the kernels whose mark is missing or wrong.

    A kernel is a function that no other one calls; what it calls may let the next kernel in for it.
    """
    called = set().union(*(one.calls for one in functions.values()))

    def early(name: str, above: frozenset[str] = frozenset()) -> bool:
        below = (functions[name].calls & functions.keys()) - above - {name}
        return functions[name].early or any(early(one, above | {name}) for one in below)

    return [
        name
        for name, function in functions.items()
        if name not in called and function.marked != early(name)
    ]


def test_every_kernel_that_opens_early_is_marked() -> None:
    functions: dict[str, Function] = {}
    for path in sorted(Path(ROOT / "kernels").rglob("*.py")):
        functions |= functions_of(path.read_text())
    assert sum(one.marked for one in functions.values()) >= 5
    assert wrong_marks(functions) == []


def test_a_missing_mark_is_found() -> None:
    helper = "@triton.jit\ndef helper(PDL):\n    gdc_launch_dependents()\n    gdc_wait()\n"
    late = "@triton.jit\ndef late(PDL):\n    gdc_wait()\n    gdc_launch_dependents()\n"
    kernel = "@triton.jit\ndef kernel(PDL):\n    helper(PDL)\n"
    marked = f"@opens_early\n{kernel}"
    assert wrong_marks(functions_of(helper + kernel)) == ["kernel"]
    assert wrong_marks(functions_of(helper + marked)) == []
    assert wrong_marks(functions_of(late)) == []
    assert wrong_marks(functions_of(f"@opens_early\n{late}")) == ["late"]
