"""How LLM and AsyncLLM meet what scripts for vLLM call: arguments that ask for nothing are taken, all else is refused.

The tables are in ipc/vllm. Type checkers see none of this: for them, what does not exist does not exist.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sidestep.ipc.errors import UnsupportedError
from sidestep.ipc.vllm.calls import ARGUMENTS, METHODS, TOKENIZER_METHODS
from sidestep.ipc.vllm.foreign import translate

P = ParamSpec("P")
R = TypeVar("R")


def takes_vllm_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function be called with arguments of vLLM's that ask for nothing; others raise ValidationError.

    What is decorated still calls itself by its own name and signature.
    """
    own = inspect.signature(function).parameters
    table = {name: foreign for name, foreign in ARGUMENTS.items() if name not in own}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if table.keys().isdisjoint(kwargs):
            return function(*args, **kwargs)
        return function(*args, **translate(kwargs, table))

    return call


class _Refusing:
    """Base of classes that name what there is in the place of an attribute of vLLM's."""

    _INSTEAD: Mapping[str, str] = {}

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if (instead := self._INSTEAD.get(name)) is not None:
                raise UnsupportedError(f"{kind}.{name}: {instead}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)


class RefusesVllmMethods(_Refusing):
    """For engines. `hasattr` is false of such a method, and calling it raises UnsupportedError."""

    _INSTEAD = METHODS


class RefusesTokenizerMethods(_Refusing):
    """For tokenizers, with the methods of transformers' ones."""

    _INSTEAD = TOKENIZER_METHODS
