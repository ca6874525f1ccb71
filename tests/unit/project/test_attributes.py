"""Objects of the executor are whole: a constructor sets every attribute that its object ever has.

An attribute is set in `__init__`, also that of a base class, or is a field of a dataclass. Other
methods may change it. None may delete it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.unit.project.test_import_rule import ROOT


def stored(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes of `self` that a piece of code assigns or deletes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node


def set_by_constructor(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the attributes that a class's constructor sets, with those of its bases among them."""
    if name not in classes:
        return set()
    found = set[str]()
    is_dataclass = "dataclass" in " ".join(map(ast.unparse, classes[name].decorator_list))
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found |= {attribute.attr for attribute in stored(node)}
        elif is_dataclass and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found.union(*(set_by_constructor(b, classes) for b in base_names(classes[name])))


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0] for base in node.bases]


def late_attributes(sources: list[str]) -> dict[str, set[str]]:
    """Return, by class, the attributes that another method than the constructor sets first.

    Attributes that a method deletes are among them.
    """
    trees = [ast.parse(source) for source in sources]
    classes = {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, set[str]] = {}
    for name, node in classes.items():
        known = set_by_constructor(name, classes)
        late = {
            attribute.attr
            for attribute in stored(node)
            if attribute.attr not in known or isinstance(attribute.ctx, ast.Del)
        }
        if late:
            found[name] = late
    return found


def test_late_attributes_are_found() -> None:
    early = """
class Base:
    def __init__(self):
        self.a, self.b = 1, 2
class Early(Base):
    def grow(self):
        self.a += 1
"""
    late = """
@dataclass(frozen=True)
class Data:
    field: int
    def grow(self):
        self.field = 3
class Late(Base):
    declared: int
    valued = 0
    def __init__(self):
        super().__init__()
        self.c = 0
    def load(self):
        self.declared, (self.valued, *self.rest) = 1, 2
        with open() as self.file:
            for self.i in range(3):
                self.more: int = 1
        del self.c
"""
    assert late_attributes([early, late]) == {
        "Late": {"declared", "valued", "rest", "file", "i", "more", "c"}
    }


def test_constructors_set_all_attributes() -> None:
    sources = [path.read_text() for path in sorted(Path(ROOT / "executor").rglob("*.py"))]
    assert not late_attributes(sources)
