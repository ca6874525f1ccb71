"""The fields of a request change by methods of the class that has them, and in no other way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.project.test_import_rule import ROOT

CORE = ROOT / "engine_core"
CHANGING = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "reverse", "setdefault", "sort", "update"),
)
"""Methods that change a list, a dict, a set or a deque."""


def fields_of(source: str) -> set[str]:
    """Return the fields of all dataclasses of a module; those of a NamedTuple never change."""
    return {
        node.target.id
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.ClassDef) and each.decorator_list
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a node assigns, deletes or changes in place."""
    if isinstance(node, ast.Assign | ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        yield node.target
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGING
    ):
        yield node.func.value


def is_foreign(target: ast.expr, fields: set[str]) -> bool:
    """Return whether a target is, or is a part of, a field of an object other than `self`."""
    if isinstance(target, ast.Tuple | ast.List):
        return any(is_foreign(each, fields) for each in target.elts)
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        if isinstance(target, ast.Attribute) and target.attr in fields:
            return not (isinstance(target.value, ast.Name) and target.value.id == "self")
        target = target.value
    return False


def aliases(function: ast.AST, fields: set[str]) -> set[str]:
    """Return the names that a function gives to such fields."""
    return {
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name, value in (
            zip(target.elts, node.value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            else [(target, node.value)]
        )
        if isinstance(name, ast.Name) and is_foreign(value, fields)
    }


def is_alias(node: ast.AST, target: ast.expr, names: set[str]) -> bool:
    """Return whether a node changes an object in place under one of these names."""
    is_in_place = isinstance(node, ast.AugAssign | ast.Call)
    while isinstance(target, ast.Subscript):
        is_in_place, target = True, target.value
    return is_in_place and isinstance(target, ast.Name) and target.id in names


def foreign_writes(source: str, fields: set[str]) -> list[str]:
    """Return the statements of a module that change fields of other objects than `self`."""
    tree = ast.parse(source)
    found = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if any(is_foreign(target, fields) for target in changed(node))
        or isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "__setattr__", "delattr")
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = aliases(function, fields)
            for node in ast.walk(function):
                if any(is_alias(node, target, names) for target in changed(node)):
                    found.add(ast.unparse(node))
    return sorted(found)


def test_every_way_to_write_a_field_is_found() -> None:
    source = """
def change(self, request, other):
    request.slot = 1
    request.slot, count = 1, 2
    request.slot += 1
    request.tokens.append(1)
    request.tokens[0] = 1
    request.grammar.end = 1
    del request.tokens[:]
    setattr(request, "slot", 1)
    for request.slot in range(3):
        pass
    tokens, blocks = request.tokens, other.slot
    tokens += [1]
    tokens.clear()
    tokens[0] = 1
    self.slot = request.slot
    counts = self.tokens
    counts[request.slot] += 1
    counts = counts + request.tokens
    request.use(1)
"""
    found = foreign_writes(source, {"slot", "tokens", "end"})
    assert found == sorted(
        [
            "request.slot = 1",
            "request.slot, count = (1, 2)",
            "request.slot += 1",
            "request.tokens.append(1)",
            "request.tokens[0] = 1",
            "request.grammar.end = 1",
            "del request.tokens[:]",
            "setattr(request, 'slot', 1)",
            "for request.slot in range(3):\n    pass",
            "tokens += [1]",
            "tokens.clear()",
            "tokens[0] = 1",
        ]
    )


def test_no_field_of_a_request_is_written_from_outside() -> None:
    """So each change of a request is a method with a name, and stands beside the others."""
    fields = set[str]().union(
        *(fields_of(file.read_text()) for file in (CORE / "requests").glob("*.py"))
    )
    assert {"status", "token_ids", "num_computed", "num_registered", "queued", "end"} <= fields
    found = {
        str(file.relative_to(ROOT)): writes
        for file in sorted(CORE.rglob("*.py"))
        if (writes := foreign_writes(file.read_text(), fields))
    }
    assert found == {}
