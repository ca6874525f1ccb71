"""Torch without three modules that a process without weights has no use for.

Torch's functions for tensors without memory import them, which takes one to two seconds of a start.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Any

_COMPILER, _ALGEBRA = "torch._dynamo", "sympy"
_SIZES = "torch.fx.experimental.symbolic_shapes"


def do_without_long_imports() -> None:
    """Put stand-ins in the place of the modules that are not imported yet."""
    for name, known in _KNOWN.items():
        sys.modules.setdefault(name, _StandIn(name, known))


class _StandIn(ModuleType):
    """Has some of a module's names. Asked for another one, it imports the module.

    The compiler is never imported: it takes longest.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__name__ == _COMPILER:
            raise AttributeError(name)
        for other in (_SIZES, _ALGEBRA):  # the first imports the second
            if isinstance(sys.modules.get(other), _StandIn):
                del sys.modules[other]
        return getattr(import_module(self.__name__), name)


class _Expression:
    """An algebraic expression, of which there are none."""


def _known(value: Any, *_: Any, **__: Any) -> bool:
    return bool(value)


def _equal(a: Any, b: Any) -> bool:
    return tuple(a) == tuple(b) if isinstance(a, (tuple, list)) else bool(a == b)


_NUMBERS = {
    "guard_or_false": _known,
    "guard_or_true": _known,
    "guard_size_oblivious": _known,
    "expect_true": _known,
    "statically_known_true": _known,
    "sym_eq": _equal,
    "sym_and": lambda *known: reduce(operator.and_, known),
    "sym_or": lambda *known: reduce(operator.or_, known),
    "is_nested_int": lambda size: False,
    "has_guarding_hint": lambda size: True,
    "guarding_hint_or_throw": lambda size: size,
    # The same two before torch 2.13.
    "has_hint": lambda size: True,
    "size_hint": lambda size, **_: size,
}
_KNOWN: dict[str, dict[str, Any]] = {
    # Functions that are written in Python ask the compiler not to look at them.
    _COMPILER: {"disable": lambda function, *_, **__: function},
    # Sizes might be expressions. Here they are numbers.
    _SIZES: _NUMBERS,
    _ALGEBRA: {"Basic": _Expression},
}
"""Module -> name -> what it is here."""
